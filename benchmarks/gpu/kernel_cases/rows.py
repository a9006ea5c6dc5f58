"""Cases of kernels that pass over rows once: norms, RoPE with the KV write, gates. Bytes: all that is read and written,
once each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.kernels.elementwise.gate_mul import GELU_TANH, SILU, gate_mul_triton, gate_mul_twin
from diptych.kernels.elementwise.rms_norm import add_rms_norm_triton, add_rms_norm_twin, rms_norm_triton, rms_norm_twin
from diptych.kernels.kv.rope_kv_write import rope_kv_write_triton, rope_kv_write_twin

from .common import DEVICE, HALF, MOVES, Case, Random, compiled, sized

EPS = 1e-5
HEADS, KV_HEADS, DIM = sized((32, 8, 128), (4, 2, 16))
BLOCK_SIZE = 16


def norm_case(num_rows: int, dim: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor]:
        random = Random(seed)
        return random.normal(num_rows, dim), random.normal(dim)

    return Case(
        "RMSNorm",
        f"{num_rows} x {dim}",
        make,
        lambda x: rms_norm_triton(*x, EPS),
        lambda x, _: rms_norm_twin(*x, EPS),
        2 * HALF.itemsize * num_rows * dim,
        peers={"torch.compile": compiled(lambda x: rms_norm_twin(*x, EPS))},
        goals=MOVES,
    )


def add_norm_case(num_rows: int, dim: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        random = Random(seed)
        return random.normal(num_rows, dim), random.normal(num_rows, dim), random.normal(dim)

    return Case(
        "add + RMSNorm",
        f"{num_rows} x {dim}",
        make,
        lambda x: (add_rms_norm_triton(*x, EPS), x[1]),
        lambda x, _: (add_rms_norm_twin(*x, EPS), x[1]),
        4 * HALF.itemsize * num_rows * dim,  # two read, two written
        peers={"torch.compile": compiled(lambda x: (add_rms_norm_twin(*x, EPS), x[1]))},
        goals=MOVES,
    )


@dataclass(frozen=True)
class RopeInputs:
    q: Tensor  # [T, N, D]
    k: Tensor  # [T, K, D]
    v: Tensor
    cos_sin: Tensor  # [T, D] float32
    cache: Tensor  # [blocks, 2, block_size, K, D]
    slots: Tensor  # [T] int64
    scales: Tensor | None

    def of(self, run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """(rotated queries, cache): what `run` returns and writes; the codes' real values where KV is quantised."""
        rotated = run(self.q, self.k, self.v, self.cos_sin, self.cache, self.slots, self.scales)
        return (rotated, self.cache) if self.scales is None else (rotated, self.cache, self.scales)


def make_rope(seed: int, num_tokens: int, stored: torch.dtype | None) -> RopeInputs:
    random = Random(seed)
    q, k, v = random.normal(num_tokens, HEADS + 2 * KV_HEADS, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    cache = torch.zeros(num_blocks, 2, BLOCK_SIZE, KV_HEADS, DIM, dtype=stored or HALF, device=DEVICE)
    scales = torch.zeros(num_blocks, 2, KV_HEADS, BLOCK_SIZE, device=DEVICE).transpose(2, 3)
    angles = random.uniform(num_tokens, DIM // 2) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    slots = random.order(num_blocks * BLOCK_SIZE)[:num_tokens]
    return RopeInputs(q, k, v, cos_sin, cache, slots, None if stored is None else scales)


def rope_by_torch(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor, _: None) -> Tensor:
    """The twin where every token is stored: it asks no tensor, so it can be compiled whole and stand in a graph."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)

    def rotated(x: Tensor) -> Tensor:
        one, two = x.float().chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1).to(x.dtype)

    blocks, places = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    cache[blocks, 0, places] = rotated(k)
    cache[blocks, 1, places] = v
    return rotated(q)


def rope_case(num_tokens: int, stored: torch.dtype | None = None) -> Case:
    by_torch = compiled(rope_by_torch)
    read = HALF.itemsize * (HEADS + 2 * KV_HEADS) * DIM + 4 * DIM + 8  # q, k, v, cos and sin, slot
    vectors = 2 * KV_HEADS * (DIM * HALF.itemsize if stored is None else DIM * stored.itemsize + 4)
    return Case(
        "RoPE + KV write" + ("" if stored is None else f", {str(stored).removeprefix('torch.')}"),
        f"{num_tokens} tokens",
        lambda seed: make_rope(seed, num_tokens, stored),
        lambda x: x.of(rope_kv_write_triton),
        lambda x, _: x.of(rope_kv_write_twin),
        num_tokens * (read + HALF.itemsize * HEADS * DIM + vectors),
        tolerance=1e-2 if stored is None else 0.05,  # of codes, the share that is rounded to a neighbour
        peers={"torch.compile": lambda x: x.of(by_torch)} if stored is None else {},
        goals=MOVES,
    )


def gate_case(num_rows: int, dim: int, activation: int, name: str) -> Case:
    return Case(
        name,
        f"{num_rows} x {dim}",
        lambda seed: Random(seed).normal(num_rows, 2 * dim),
        lambda x: gate_mul_triton(x, activation),
        lambda x, _: gate_mul_twin(x, activation),
        3 * HALF.itemsize * num_rows * dim,
        peers={"torch.compile": compiled(lambda x: gate_mul_twin(x, activation))},
        goals=MOVES,
    )


def cases() -> Iterator[Case]:
    yield norm_case(*sized((16384, 4096), (5, 72)))
    yield norm_case(*sized((262144, 128), (40, 16)))  # as of queries' and keys' heads
    yield add_norm_case(*sized((16384, 4096), (5, 72)))
    yield rope_case(sized(8192, 21))
    yield rope_case(sized(8192, 21), torch.int8)
    yield gate_case(*sized((4096, 14336), (3, 70)), SILU, "SiLU * mul")
    yield gate_case(*sized((4096, 14336), (3, 70)), GELU_TANH, "GELU (tanh) * mul")
