"""Decode over latent KV in the absorbed form beside the expanded one: milliseconds a layer, the best of several.

    python -m benchmarks.kernels.latent_attention [--contexts 512 2048 8192] [--sequences 1 8] [--threads 2]

The sizes are DeepSeek-V2-Lite's: 16 heads, latents of 512, rotated keys of 64, values and other keys of 128. Each
sequence decodes one token; the expanded form makes keys and values of its whole context first. Both read latents out of
the same paged cache. Bytes are what the cache holds of a context in one layer, and what keys and values would take.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from diptych.kernels.attention.paged_batch import PagedBatch
from diptych.workers.models.checkpoint.weights import LayerWeights
from diptych.workers.models.families.spec import LatentSpec, RopeSpec
from diptych.workers.models.layers.mla import absorbed, expanded

SPEC = LatentSpec(16, 0, 512, nope_dim=128, rope_dim=64, value_dim=128, rope=RopeSpec(), scale=192**-0.5)
BLOCK_SIZE = 16
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = DTYPES[args.dtype]
    none = torch.empty(0)
    kv_b = torch.randn(SPEC.num_heads * (SPEC.nope_dim + SPEC.value_dim), SPEC.kv_rank) / 40
    weights = LayerWeights(none, none, kv_b=kv_b.to(dtype))
    print(f"{args.dtype}, {args.threads} threads")
    print("sequences  context  absorbed ms  expanded ms  ratio   latents MiB  keys and values MiB")
    for num_seqs in args.sequences:
        for context_len in args.contexts:
            report(weights, num_seqs, context_len, dtype, args.times)


@torch.inference_mode()
def report(weights: LayerWeights, num_seqs: int, context_len: int, dtype: torch.dtype, times: int) -> None:
    width = -(-context_len // BLOCK_SIZE)
    latents = torch.randn(num_seqs * width, BLOCK_SIZE, SPEC.kv_dim, dtype=dtype)
    tables = torch.randperm(num_seqs * width).int().view(num_seqs, width)
    lens = [context_len] * num_seqs
    batch = PagedBatch(
        tables,
        torch.tensor(lens, dtype=torch.int32),
        torch.arange(num_seqs + 1, dtype=torch.int32),
        lens,
        [1] * num_seqs,
        num_seqs,
        BLOCK_SIZE,
    )
    q = torch.randn(num_seqs, SPEC.num_heads, SPEC.q_dim, dtype=dtype)

    def by(form: Callable[..., Tensor]) -> tuple[float, Tensor]:
        return best(lambda: form(SPEC, weights, q, latents, batch, range(num_seqs)), times)

    (absorbed_ms, ours), (expanded_ms, theirs) = by(absorbed), by(expanded)
    error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    assert error < 0.02, f"the two forms differ by {error:.3f}"
    numbers = num_seqs * context_len * dtype.itemsize / 2**20
    per_head = SPEC.q_dim + SPEC.value_dim
    print(
        f"{num_seqs:9} {context_len:8} {absorbed_ms:12.2f} {expanded_ms:12.2f} {expanded_ms / absorbed_ms:6.1f} "
        f"{numbers * SPEC.kv_dim:13.1f} {numbers * SPEC.num_heads * per_head:20.1f}"
    )


def best(work: Callable[[], Tensor], times: int) -> tuple[float, Tensor]:
    """Milliseconds, and what it gives."""
    found, taken = work(), list[float]()
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1e3 * min(taken), found


if __name__ == "__main__":
    main()
