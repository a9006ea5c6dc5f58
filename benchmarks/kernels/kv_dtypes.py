"""Compiled decode attention over KV of each dtype, on one machine: `python -m benchmarks.kernels.kv_dtypes`.

The dtypes are measured in turn, several times over, and the best of each counts: what else the machine does slows all
of them. One thread is measured by its CPU time. Several layers are used in turn, more than the last-level cache holds.
Bytes are those of K and V with their scales.
"""

import argparse
import time
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from diptych.kernels.attention.paged_batch import PagedBatch
from diptych.kernels.cpu.attention import AttentionLimits, AttentionScratch, Heads, paged_attention, plan_attention
from diptych.kernels.cpu.library import Team
from diptych.workers.device.kv_cache import STORED
from diptych.workers.kv.dtypes import stored_size, vector_bytes

from ..common.compiled import compiled_team
from .attention import BLOCK_SIZE, SHAPES, in_huge_pages, make_batch

KINDS = {  # by name: dtypes of the queries and of the cache
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("bfloat16", "int8"),
    "fp8": ("bfloat16", "fp8"),
    "int4": ("bfloat16", "int4"),
}
POOL_BYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """Attention of one step over layers of one dtype."""

    team: Team
    heads: Heads
    batch: PagedBatch
    scratch: AttentionScratch
    q: Tensor
    layers: list[Tensor]
    num_bytes: int  # of K and V that a layer's step reads

    @classmethod
    def of(cls, team: Team, kind: str, shape: tuple[int, int, int], num_seqs: int, context_len: int) -> "Case":
        (num_heads, num_kv_heads, dim), (of_q, of_cache) = shape, (STORED[name] for name in KINDS[kind])
        size = vector_bytes(KINDS[kind][1], dim)
        batch = make_batch(num_seqs, 1, context_len)
        num_blocks = batch.block_tables.numel()
        layer_bytes = num_blocks * 2 * BLOCK_SIZE * num_kv_heads * size
        num_layers = max(POOL_BYTES // layer_bytes, 1)
        columns = 16 * size // of_cache.itemsize
        pool = torch.empty(num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE // 16, columns, dtype=of_cache)
        if size == dim * of_cache.itemsize:
            pool.copy_(torch.randn(pool[:1].shape))
        else:  # any bits of the numbers, and a scale of a usual size
            numbers = 16 * stored_size(KINDS[kind][1], dim)
            pool.view(torch.uint8)[..., :numbers] = torch.randint(0, 127, (1,), dtype=torch.uint8)
            pool[..., numbers:].view(torch.bfloat16).fill_(0.01)
        packed = in_huge_pages(pool)
        heads, q = Heads.of(num_heads, num_kv_heads, dim), torch.randn(num_seqs, num_heads, dim).to(of_q)
        scratch = AttentionScratch.of(team, q.dtype, heads, AttentionLimits(num_seqs, num_seqs, context_len))
        plan_attention(team, q.dtype, heads, batch, scratch)
        layers = [packed[:, i] for i in range(num_layers)]
        num_bytes = num_seqs * context_len * num_kv_heads * 2 * size
        return cls(team, heads, batch, scratch, q, layers, num_bytes)

    def best_s(self, seconds: float) -> float:
        clock = time.thread_time if self.team.num_threads == 1 else time.perf_counter
        best, end = float("inf"), clock() + seconds
        for layer in cycle(self.layers):
            start = clock()
            paged_attention(self.team, self.q, layer, self.batch, self.heads, self.scratch)
            now = clock()
            best = min(best, now - start)
            if now > end:
                return best
        raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each dtype in a round")
    args = parser.parse_args()
    team = compiled_team(args.threads)
    print(f"{team.library.isa}, {args.threads} threads, decode {args.batch} x {args.context}")
    for name, shape in SHAPES.items():
        cases = {kind: Case.of(team, kind, shape, args.batch, args.context) for kind in KINDS}
        best = dict.fromkeys(KINDS, float("inf"))
        for _ in range(args.rounds):
            for kind, case in cases.items():
                best[kind] = min(best[kind], case.best_s(args.seconds))
        for kind, seconds in best.items():
            speeds = f"{best['bfloat16'] / seconds:5.2f} x bfloat16, {best['float32'] / seconds:5.2f} x float32"
            size = cases[kind].num_bytes
            print(f"{name:5} {kind:9} {seconds * 1e3:8.2f} ms a layer  {size / seconds / 1e9:5.1f} GB/s  {speeds}")


if __name__ == "__main__":
    main()
