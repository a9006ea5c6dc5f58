"""A mixture's experts by the compiled grouped path, against transformers on the same weights and choices.

    python -m benchmarks.kernels.experts [--shape qwen3 mixtral ...] [--tokens 1 4 16 64 256 1024]
        [--format plain int8 int4] [--threads 2] [--seconds 2] [--json FILE]

transformers computes in two ways, both measured: its loop over experts ("loop") and torch's grouped product ("torch
grouped"). They and ours take turns, in bfloat16; a figure is the mean of the best times of three choices of experts,
which no cache holds from one to the next. `read` is the bytes of the experts that were chosen, each once, over the
time, as a share of the bandwidth that roofline.py measures before; `multiplied` the same of operations. Routers choose
by chance: every expert as likely as another.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_PROC_BIND", "close")
os.environ.setdefault("OMP_PLACES", "cores")
CORES = sorted(os.sched_getaffinity(0))  # before torch binds this thread to one of them

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import GptOssConfig, MixtralConfig  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402

from diptych.kernels.cpu.experts import ExpertMemory, Gate, PackedExperts, experts  # noqa: E402
from diptych.kernels.cpu.formats import AT_LOAD, Format  # noqa: E402
from diptych.kernels.cpu.library import Team  # noqa: E402
from diptych.kernels.cpu.linear import Epilogue, PackedLinear, pack, packed_bytes  # noqa: E402
from diptych.kernels.elementwise.gate_mul import ALPHA, LIMIT  # noqa: E402

from ..common import roofline  # noqa: E402
from ..common.compiled import compiled_team  # noqa: E402
from ..common.roofline import Roofline  # noqa: E402
from .linear import in_huge_pages  # noqa: E402

NUM_CHOICES = 3  # different ones, in turn


@dataclass(frozen=True)
class Shape:
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    is_clamped: bool = False  # gpt-oss's gate, and biases


SHAPES = {
    "qwen3": Shape(128, 8, 2048, 768),  # Qwen3-30B-A3B
    "mixtral": Shape(8, 2, 2048, 7168),  # Mixtral 8x7B, at half its sizes
    "gpt-oss": Shape(32, 4, 2880, 2880, is_clamped=True),  # gpt-oss-20b
}


class Mixture:
    """Random experts of a shape, as transformers has them and packed."""

    def __init__(self, team: Team, shape: Shape, formats: list[Format]) -> None:
        self.team, self.shape = team, shape
        self.gate_up = torch.empty(shape.num_experts, 2 * shape.inner, shape.hidden, dtype=torch.bfloat16)
        self.down = torch.empty(shape.num_experts, shape.hidden, shape.inner, dtype=torch.bfloat16)
        for weights in (self.gate_up, self.down):
            rows = torch.randn(weights.shape[1:]).bfloat16() * weights.shape[2] ** -0.5
            for of in weights:
                of.copy_(rows[torch.randperm(len(rows))])
        self.gate_up_bias, self.down_bias = (torch.randn(of.shape[:2]).bfloat16() for of in (self.gate_up, self.down))
        self.theirs = {how: self._by_transformers(how) for how in ("eager", "grouped_mm")}
        self.ours = {format: self._packed(format) for format in formats}

    def _by_transformers(self, how: str) -> MixtralExperts | GptOssExperts:
        shape = self.shape
        sizes = {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_local_experts": shape.num_experts,
            "experts_implementation": how,
        }
        with torch.device("meta"):
            made = GptOssExperts(GptOssConfig(**sizes)) if shape.is_clamped else MixtralExperts(MixtralConfig(**sizes))
        tensors = {"gate_up_proj": self.gate_up, "down_proj": self.down}
        if shape.is_clamped:  # inputs come first there, and gate and up in turn
            tensors = {"gate_up_proj": _in_turn(self.gate_up).mT, "down_proj": self.down.mT}
            tensors |= {"gate_up_proj_bias": _in_turn(self.gate_up_bias), "down_proj_bias": self.down_bias}
        for name, tensor in tensors.items():
            setattr(made, name, torch.nn.Parameter(tensor.contiguous(), requires_grad=False))
        return made

    def _packed(self, format: Format) -> PackedExperts:
        arena, used = in_huge_pages(2 * self.shape.num_experts * self._most_bytes(format)), 0

        def take(num_bytes: int) -> Tensor:
            nonlocal used
            used += num_bytes
            return arena[used - num_bytes : used]

        def packed(weights: Tensor, biases: Tensor, *, gated: bool) -> list[PackedLinear]:
            own = biases if self.shape.is_clamped else [None] * len(weights)
            pairs = zip(weights, own, strict=True)
            return [pack(self.team, [w], bias, gated=gated, format=format, take=take) for w, bias in pairs]

        gate_up = packed(self.gate_up, self.gate_up_bias, gated=True)
        down = packed(self.down, self.down_bias, gated=False)
        gate = Gate(Epilogue.CLAMPED_MUL, ALPHA, LIMIT) if self.shape.is_clamped else Gate()
        return PackedExperts(gate_up, down, self.shape.top_k, gate)

    def _most_bytes(self, format: Format) -> int:
        return packed_bytes(2 * self.shape.inner, self.shape.hidden, torch.bfloat16, format)

    def expert_bytes(self, format: Format) -> int:
        down = packed_bytes(self.shape.hidden, self.shape.inner, torch.bfloat16, format)
        return self._most_bytes(format) + down

    def choose(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        weights, ids = torch.randn(num_tokens, self.shape.num_experts).softmax(dim=1).topk(self.shape.top_k)
        return weights / weights.sum(dim=1, keepdim=True), ids


def _in_turn(gate_up: Tensor) -> Tensor:
    """[E, 2I, ...], gate before up, to [E, 2I, ...] where they take turns."""
    return gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def main() -> None:
    args = parse()
    team = compiled_team(args.threads, CORES)
    limits = roofline.measure(args.threads)
    print(f"reads {limits.read_bytes_s / 1e9:.1f} GB/s, multiplies {limits.flops / 1e9:.0f} GFLOP/s", flush=True)
    found: list[dict[str, object]] = []
    for name in args.shape:
        mixture = Mixture(team, SHAPES[name], [Format[format.upper()] for format in args.format])
        for num_tokens in args.tokens:
            rows = measure(limits, args.seconds, mixture, name, num_tokens)
            found += [{"shape": name, **row} for row in rows]
        del mixture  # before there is another
    team.close()
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--format", nargs="+", choices=[f.name.lower() for f in AT_LOAD], default=["plain"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number of tokens")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(limits: Roofline, seconds: float, mixture: Mixture, name: str, num_tokens: int) -> list[dict[str, object]]:
    """A row for each format."""
    shape, team = mixture.shape, mixture.team
    x = torch.randn(num_tokens, shape.hidden).bfloat16()
    choices = [mixture.choose(num_tokens) for _ in range(NUM_CHOICES)]
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        how: lambda weights, ids, of=of: of(x, ids, weights.bfloat16()) for how, of in mixture.theirs.items()
    }
    for format, packed in mixture.ours.items():
        memory = ExpertMemory(team, packed.sizes, num_tokens)
        calls[format.name] = lambda weights, ids, packed=packed, memory=memory: experts(
            team, x, weights, ids.int(), packed, memory=memory
        )
    check(calls, choices[0])
    times = best_of(calls, choices, seconds)
    num_chosen = statistics.mean(len(ids.unique()) for _, ids in choices)
    flops = 6 * num_tokens * shape.top_k * shape.hidden * shape.inner
    rows: list[dict[str, object]] = []
    for format in mixture.ours:
        ours = times[format.name]
        read = limits.share_of_reading(num_chosen * mixture.expert_bytes(format), ours)
        multiplied = limits.share_of_multiplying(flops, ours)
        print(
            f"{name:8} {format.name.lower():5} tokens {num_tokens:4}: {ours * 1e3:8.2f} ms, read {read:4.0%}, "
            f"multiplied {multiplied:4.0%} | loop {times['eager'] * 1e3:8.2f} ms x{times['eager'] / ours:.2f} | "
            f"torch grouped {times['grouped_mm'] * 1e3:8.2f} ms x{times['grouped_mm'] / ours:.2f}",
            flush=True,
        )
        rows.append(
            {
                "format": format.name.lower(),
                "tokens": num_tokens,
                "ours_s": ours,
                "loop_s": times["eager"],
                "torch_grouped_s": times["grouped_mm"],
                "read_share": read,
                "multiplied_share": multiplied,
            }
        )
    return rows


def check(calls: dict[str, Callable[[Tensor, Tensor], Tensor]], choice: tuple[Tensor, Tensor]) -> None:
    """Check that all calls compute the same; call each once."""
    wanted = calls["eager"](*choice).float()
    for name, call in calls.items():
        error = float((call(*choice).float() - wanted).norm() / wanted.norm())
        assert error < (0.2 if name == "INT4" else 0.02), f"{name} is off by {error:.3f}"


def best_of(
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]], choices: list[tuple[Tensor, Tensor]], seconds: float
) -> dict[str, float]:
    """The mean of the choices' shortest times, of each call; they take turns for `seconds` in all, once at least."""
    best = {name: [float("inf")] * len(choices) for name in calls}
    end, is_first = time.perf_counter() + seconds, True
    while is_first or time.perf_counter() < end:
        for name, call in calls.items():
            call(*choices[-1])  # while the threads of the one before come to rest
            for i, choice in enumerate(choices):
                start = time.perf_counter()
                call(*choice)
                best[name][i] = min(best[name][i], time.perf_counter() - start)
        is_first = False
    return {name: statistics.mean(times) for name, times in best.items()}


if __name__ == "__main__":
    torch.inference_mode()(main)()
