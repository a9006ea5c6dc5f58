"""Rates that this machine reaches at best: bytes read from memory and bfloat16 operations, each a second.

    python -m benchmarks.common.roofline [--seconds 3] [--json FILE]

Reading: 512 MiB in huge pages, one slice a thread. Multiplying: the dot-product instruction on operands in the L1 cache
(roofline.c, compiled here by the machine's `cc`), and oneDNN's product of two large matrices by way of torch. Each is
the best of many short tries: a limit is what was reached once. Where there is no compiler, torch alone is measured.

Other benchmarks call `measure` and give their figures as a share of `Roofline`: a decode step reads the weights and the
KV once, a prefill multiplies every weight with every token.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from diptych.workers.models.families.spec import AttentionSpec, LatentSpec, MlpSpec, ModelSpec, MoeSpec

READ_BYTES = 512 << 20
REPEATS = 4000  # of the tile: some 3 ms
MATRIX = 4096


@dataclass(frozen=True)
class Roofline:
    """Rates of as many cores as `threads`; 0 where a rate could not be measured."""

    threads: int
    read_bytes_s: float
    l1_flops: float  # operations a second, operands in L1
    matrix_flops: float  # the same of a large matrix product by oneDNN

    @property
    def flops(self) -> float:
        return max(self.l1_flops, self.matrix_flops)

    def share_of_reading(self, num_bytes: float, seconds: float) -> float:
        return num_bytes / seconds / self.read_bytes_s

    def share_of_multiplying(self, num_flops: float, seconds: float) -> float:
        return num_flops / seconds / self.flops


@dataclass(frozen=True)
class ModelCost:
    """Costs of a checkpoint in a dtype of `item_bytes`. kv_share: bytes of its KV, of those in that dtype."""

    spec: ModelSpec
    item_bytes: int = 2
    weight_bytes: float | None = None  # of a weight that a token is multiplied by, scales included; None: item_bytes
    kv_share: float = 1.0

    @property
    def num_layer_weights(self) -> int:
        """Number of weights that a token is multiplied by; in a mixture, only those of the experts that it goes to."""
        return round(self.num_touched(1))

    def num_touched(self, batch: int) -> float:
        """Number of the layers' weights that `batch` tokens are multiplied by; each goes to experts at random."""
        assert self.spec.token_input is None, "what layers are given of each token is not counted"
        hidden = self.spec.hidden_size
        parts = [of for layer in self.spec.layers for of in (layer.feed_forward, layer.beside) if of is not None]
        mlps = hidden * sum(_mlp_columns(of, batch) for of in parts)
        return mlps + sum(_attention_weights(layer.attention, hidden) for layer in self.spec.layers)

    @property
    def num_decode_products(self) -> int:
        """Multiplications of a token that decodes with each one that it sees, over all layers: of latents, absorbed."""
        of = [layer.attention for layer in self.spec.layers]
        return sum(a.num_heads * (a.kv_dim + a.kv_rank) if isinstance(a, LatentSpec) else 2 * a.q_size for a in of)

    @property
    def num_prompt_products(self) -> int:
        """The same of a prompt's: of latents, expanded."""
        return sum(a.num_heads * (a.q_dim + a.value_dim) for a in (layer.attention for layer in self.spec.layers))

    @property
    def num_head_weights(self) -> int:
        return self.spec.hidden_size * self.spec.vocab_size

    def decode_bytes(self, batch: int, context: int) -> int:
        """Bytes that a step must read: the weights that it needs once, and the KV of `context` tokens of each of
        `batch`."""
        of = [layer.attention for layer in self.spec.layers]
        kv = sum(2 * a.kv_size if isinstance(a, AttentionSpec) else a.kv_dim for a in of) * context
        weight_bytes = self.item_bytes if self.weight_bytes is None else self.weight_bytes
        num_weights = round(self.num_touched(batch)) + self.num_head_weights
        return round(weight_bytes * num_weights) + round(self.item_bytes * batch * kv * self.kv_share)

    def decode_flops(self, batch: int, context: int) -> int:
        attention = 2 * self.num_decode_products * context
        return batch * (2 * (self.num_layer_weights + self.num_head_weights) + attention)

    def prefill_flops(self, num_tokens: int) -> int:
        """Two for each weight and token, causal attention, and the logits of the last token alone."""
        attention = self.num_prompt_products * num_tokens * num_tokens
        return 2 * self.num_layer_weights * num_tokens + attention + 2 * self.num_head_weights

    def decode_share(self, roofline: Roofline, batch: int, context: int, seconds: float) -> float:
        """Share of the limit that binds: of reading in small batches, of multiplying in large ones."""
        return max(
            roofline.share_of_reading(self.decode_bytes(batch, context), seconds),
            roofline.share_of_multiplying(self.decode_flops(batch, context), seconds),
        )

    def prefill_share(self, roofline: Roofline, num_tokens: int, seconds: float) -> float:
        return roofline.share_of_multiplying(self.prefill_flops(num_tokens), seconds)


def _attention_weights(of: AttentionSpec | LatentSpec, hidden: int) -> int:
    if isinstance(of, AttentionSpec):
        return hidden * (2 * of.q_size + (2 * of.kv_size if of.kv_from is None else 0))
    queries = of.num_heads * of.q_dim
    into = hidden * ((of.q_rank or queries) + of.kv_dim) + of.q_rank * queries
    return into + of.num_heads * (of.kv_rank * (of.nope_dim + of.value_dim) + of.value_dim * hidden)


def _mlp_columns(of: MlpSpec | MoeSpec, batch: int) -> float:
    """Number of vectors as long as the hidden state that some of `batch` tokens read."""
    if isinstance(of, MlpSpec):
        return 3 * of.intermediate_size
    num = of.num_experts
    touched = num * (1 - (1 - of.routing.top_k / num) ** batch)
    always = num + (_mlp_columns(of.shared, batch) if of.shared is not None else 0)
    return always + touched * _mlp_columns(of.expert, batch)


def measure(threads: int, seconds: float = 3.0) -> Roofline:
    """Takes about `seconds`, a third for each rate."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
        loops = _compile(Path(folder))
        if loops is None:
            return Roofline(threads, _read_with_torch(threads, seconds), 0.0, _matrix_flops(threads, seconds))
        return Roofline(
            threads,
            _read_with(loops, pool, threads, seconds / 3),
            _multiply_with(loops, pool, threads, seconds / 3),
            _matrix_flops(threads, seconds / 3),
        )


def _compile(folder: Path) -> ctypes.CDLL | None:
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        return None
    source, library = Path(__file__).with_name("roofline.c"), folder / "roofline.so"
    options = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([*compiler.split(), *options, "-o", str(library), str(source)], check=True)
    loops = ctypes.CDLL(str(library))
    loops.read_words.argtypes, loops.read_words.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
    loops.multiply_bf16.argtypes = [ctypes.c_size_t, ctypes.POINTER(ctypes.c_float)]
    loops.multiply_bf16.restype = ctypes.c_double
    return loops


def _best(run: Callable[[], object], seconds: float) -> float:
    """The shortest time of `run`, after one to warm up, in s."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or best == float("inf"):
        run()
        best = min(best, time.perf_counter() - start)
    return best


def _read_with(loops: ctypes.CDLL, pool: ThreadPoolExecutor, threads: int, seconds: float) -> float:
    with mmap.mmap(-1, READ_BYTES) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:] = bytes([1]) * READ_BYTES  # memory that was never written is one page of zeros
        view = ctypes.c_char.from_buffer(memory)
        address, words = ctypes.addressof(view), READ_BYTES // 8 // threads // 64 * 64
        starts = [address + 8 * words * i for i in range(threads)]
        best = _best(lambda: list(pool.map(lambda start: loops.read_words(start, words), starts)), seconds)
        del view  # or the mapping cannot be closed
    return 8 * words * threads / best


def _multiply_with(loops: ctypes.CDLL, pool: ThreadPoolExecutor, threads: int, seconds: float) -> float:
    if not loops.has_bf16():
        return 0.0

    def run(_: int) -> float:
        return loops.multiply_bf16(REPEATS, ctypes.byref(ctypes.c_float()))

    flops = sum(pool.map(run, range(threads)))
    return flops / _best(lambda: list(pool.map(run, range(threads))), seconds)


def _read_with_torch(threads: int, seconds: float) -> float:
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _best(numbers.sum, seconds)


def _matrix_flops(threads: int, seconds: float) -> float:
    import torch

    torch.set_num_threads(threads)
    a, b = (torch.randn(MATRIX // 2, MATRIX, dtype=torch.bfloat16) for _ in range(2))
    return 2 * (MATRIX // 2) ** 2 * MATRIX / _best(lambda: torch.nn.functional.linear(a, b), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each number of threads")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    rows = [measure(threads, args.seconds) for threads in sorted({1, cores})]
    print(f"{'threads':>7} {'read GB/s':>10} {'bf16 in L1 GFLOP/s':>19} {'large product GFLOP/s':>22}")
    for r in rows:
        print(f"{r.threads:7} {r.read_bytes_s / 1e9:10.1f} {r.l1_flops / 1e9:19.0f} {r.matrix_flops / 1e9:22.0f}")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rows], indent=2))


if __name__ == "__main__":
    main()
