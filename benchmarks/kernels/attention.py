"""Compiled attention beside torch (gather + SDPA) and this machine's limits: `python -m benchmarks.kernels.attention`.

Bytes are those of K and V that a step must read, FLOPs the causal half of QK^T and PV. Several layers are used
in turn, more than the last-level cache holds, as a model does. Each figure is the best of a few seconds' calls.
"""

import argparse
import mmap
import time
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from diptych.kernels.attention.paged_attention import paged_attention_twin
from diptych.kernels.attention.paged_batch import PagedBatch
from diptych.kernels.cpu.attention import (
    AttentionLimits,
    AttentionScratch,
    Heads,
    pack,
    paged_attention,
    plan_attention,
)
from diptych.kernels.cpu.library import Team

from ..common.compiled import compiled_team

BLOCK_SIZE = 16
POOL_BYTES = 96 << 20  # of all layers together: three times the last-level cache of a desktop
SHAPES = {"135M": (9, 3, 64), "1B": (32, 8, 64)}  # query heads, KV heads, head_dim
WORK = {  # sequences, new tokens each, context
    "decode 16 x 192": (16, 1, 192),
    "decode 32 x 528": (32, 1, 528),
    "decode 1 x 192": (1, 1, 192),
    "decode 1 x 2048": (1, 1, 2048),
    "decode 1 x 8192": (1, 1, 8192),
    "prefill 512": (1, 512, 512),
    "prefill 2048": (1, 2048, 2048),
    "512 after 2048": (1, 512, 2560),
}


def make_batch(num_seqs: int, num_new: int, context_len: int) -> PagedBatch:
    width = -(-context_len // BLOCK_SIZE)
    order = torch.randperm(num_seqs * width, generator=torch.Generator().manual_seed(0))
    return PagedBatch(
        block_tables=order.int().view(num_seqs, width),
        context_lens=torch.full((num_seqs,), context_len, dtype=torch.int32),
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32) * num_new,
        host_context_lens=[context_len] * num_seqs,
        host_num_new=[num_new] * num_seqs,
        num_decodes=num_seqs if num_new == 1 else 0,
        block_size=BLOCK_SIZE,
    )


def in_huge_pages(of: Tensor) -> Tensor:
    """A copy, where a worker's pool is."""
    huge = 2 << 20
    mapping = mmap.mmap(-1, -(-of.numel() * of.element_size() // huge) * huge, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=of.dtype, count=of.numel()).view(of.shape).copy_(of)


def best_s(call: Callable[[], object], seconds: float) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def measure(team: Team, shape: tuple[int, int, int], work: tuple[int, int, int], seconds: float) -> tuple[float, ...]:
    """Seconds of ours and torch's, bytes read, FLOPs."""
    (num_heads, num_kv_heads, dim), (num_seqs, num_new, context_len) = shape, work
    batch = make_batch(*work)
    num_blocks = batch.block_tables.numel()
    layer_bytes = num_blocks * 2 * BLOCK_SIZE * num_kv_heads * dim * 2
    num_layers = max(POOL_BYTES // layer_bytes, 1)
    rows = torch.randn(num_blocks, num_layers, 2, BLOCK_SIZE, num_kv_heads, dim).bfloat16()
    packed = in_huge_pages(torch.stack([pack(rows[:, i].contiguous()) for i in range(num_layers)], dim=1))
    q = torch.randn(num_seqs * num_new, num_heads, dim).bfloat16()
    heads = Heads.of(num_heads, num_kv_heads, dim)
    scratch = AttentionScratch.of(team, q.dtype, heads, AttentionLimits(num_seqs, len(q), context_len))
    plan_attention(team, q.dtype, heads, batch, scratch)
    layers, twin_layers = cycle(range(num_layers)), cycle(range(num_layers))

    def ours() -> Tensor:
        return paged_attention(team, q, packed[:, next(layers)], batch, heads, scratch)

    def torchs() -> Tensor:
        return paged_attention_twin(q, rows[:, next(twin_layers)], batch)

    seen = num_new * context_len - num_new * (num_new - 1) // 2
    flops = 4 * num_seqs * seen * num_heads * dim
    num_bytes = num_seqs * context_len * num_kv_heads * dim * 2 * 2
    return best_s(ours, seconds), best_s(torchs, seconds), num_bytes, flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--bandwidth", type=float, default=43.0, help="read bandwidth of all threads, GB/s")
    parser.add_argument("--gflops", type=float, default=870.0, help="bfloat16 dot products of all threads, GFLOP/s")
    parser.add_argument("--only", default="", help="work whose name contains this")
    args = parser.parse_args()
    team = compiled_team(args.threads)
    print(f"{team.library.isa}, {args.threads} threads; bfloat16, blocks of {BLOCK_SIZE}")
    print(f"{'':24}{'ours us':>10}{'torch us':>10}{'faster':>8}{'GB/s':>8}{'GFLOP/s':>9}{'% of roofline':>15}")
    for model, shape in SHAPES.items():
        for name, work in WORK.items():
            if args.only not in name:
                continue
            ours, theirs, num_bytes, flops = measure(team, shape, work, args.seconds)
            least = max(num_bytes / args.bandwidth / 1e9, flops / args.gflops / 1e9)
            print(
                f"{model:6}{name:18}{ours * 1e6:10.1f}{theirs * 1e6:10.1f}{theirs / ours:7.1f}x"
                f"{num_bytes / ours / 1e9:8.1f}{flops / ours / 1e9:9.1f}{100 * least / ours:14.0f}%",
                flush=True,
            )
    team.close()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
