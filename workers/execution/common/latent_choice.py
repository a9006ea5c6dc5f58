"""Choice of what attends over latents for decodes: a kernel for sm_90 that has not run yet, or our own.

As in library_choice.py both are timed at load, on random numbers of the first layer's sizes, before graphs hold one.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ....kernels.attention.decode_plan import Decodes
from ....kernels.attention.paged_batch import LatentKernel
from ....kernels.mla.decode import mla_decode_triton, plan_mla_decode
from ....kernels.mla.hopper_latents import HopperLatents, find_latents, knows
from ...device.device import Device, Lane
from ...models.families.spec import LatentSpec
from ...models.layers.decoder import Decoder
from .timed_choice import Contest, fastest, timed_on

TOLERANCE = 2e-2  # of bfloat16 results of random numbers, absolute
NUM_SEQS, LONGEST, BLOCK_SIZE = 16, 2048, 16
ODD = (0, 1, 63, 65, 127, 128, 129, 193)  # contexts of the first sequences: none, and around one and two tiles


def choose_latents(device: Device, lane: Lane, decoder: Decoder) -> HopperLatents | None:
    """None: our kernel attends."""
    kernel = find_latents(device.torch_device)
    spec, embed = decoder.layers[0].spec.attention, decoder.weights.embed
    if kernel is None or not isinstance(spec, LatentSpec):
        return None
    if not knows(spec.num_heads, spec.kv_rank, spec.rope_dim, embed.dtype):
        return None
    attend = _attend(spec, embed)
    device.synchronize()  # the numbers are there: the lane does not wait for them

    def by_kernel() -> Tensor:
        out = attend(kernel)
        if kernel.spilled:
            raise RuntimeError(f"{kernel.spilled} registers of a thread lie in memory")
        return out

    contest = Contest("decodes over latents", "attended to", sum(_contexts()), TOLERANCE)
    return fastest(contest, partial(attend, None), [(kernel, by_kernel)], timed_on(lane))


def _contexts() -> list[int]:
    return [*ODD, *(LONGEST - 37 * s for s in range(NUM_SEQS - len(ODD)))]


def _attend(spec: LatentSpec, like: Tensor) -> Callable[[LatentKernel | None], Tensor]:
    """Calls that attend over latents of this layer's sizes, blocks in any order."""

    def numbers(*shape: int) -> Tensor:
        return like.new_empty(shape).normal_()

    width = LONGEST // BLOCK_SIZE
    q = numbers(NUM_SEQS, spec.num_heads, spec.kv_rank + spec.rope_dim)
    cache = numbers(NUM_SEQS * width, BLOCK_SIZE, spec.kv_rank + spec.rope_dim)
    tables = torch.randperm(NUM_SEQS * width, device=like.device).int().view(NUM_SEQS, width)
    contexts = torch.tensor(_contexts(), dtype=torch.int32, device=like.device)
    starts = torch.arange(NUM_SEQS + 1, dtype=torch.int32, device=like.device)
    decodes = Decodes(tables, contexts, starts, 1)
    plan = plan_mla_decode(decodes, cache, spec.num_heads, spec.kv_rank)
    queries = q[..., : spec.kv_rank], q[..., spec.kv_rank :]
    return lambda kernel: mla_decode_triton(*queries, cache, decodes, plan, spec.scale, kernel)
