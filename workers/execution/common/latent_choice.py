"""Choice of what attends over latents for decodes, by the sizes of the first layer: our kernel, or a LatentLibrary.

Those are FlashMLA, where it is installed, and a kernel for sm_90 that has not run yet. Chosen before graphs hold one.
"""

import logging
from functools import partial

import torch
from torch import Tensor

from ....kernels.attention.decode_plan import DecodePlan, Decodes
from ....kernels.attention.paged_batch import LatentLibrary
from ....kernels.common.lang import kernel_for
from ....kernels.mla.decode import mla_decode_triton, mla_decode_twin, plan_mla_decode
from ....kernels.mla.hopper_latents import HopperLatents, find_latents
from ....kernels.mla.latent_library import BLOCK_SIZE, FlashMla, find_latent_library
from ...device.device import Lane
from ...device.kv_cache import KVCache
from ...models.families.spec import LatentSpec
from ...models.layers.decoder import Decoder
from .timed_choice import Contest, Work, fastest, made_on, timed_on

NUM_SEQS, LONGEST = 16, 2048
ODD = (0, 1, 63, 65, 127, 128, 129, 193)  # contexts of the first sequences: none, and around one and two tiles

log = logging.getLogger("diptych.worker")

Inputs = tuple[Tensor, Tensor, Tensor, Decodes, DecodePlan, float]  # of LatentLibrary.attend


def choose_latents(lane: Lane, decoder: Decoder, cache: KVCache) -> LatentLibrary | None:
    """None: our kernel attends."""
    spec, embed = decoder.layers[0].spec.attention, decoder.weights.embed
    found = find_latent_library(embed.device), find_latents(embed.device)
    libraries: list[LatentLibrary] = [library for library in found if library is not None]
    if not libraries or not isinstance(spec, LatentSpec):
        return None
    inputs = made_on(lane, partial(_inputs, spec, embed, cache.layout.block_size))
    others = [(each, partial(_by, each, inputs)) for each in libraries if each.takes(*inputs[:4])]
    if found[0] is not None and cache.layout.block_size != BLOCK_SIZE:
        log.info("latents are not attended to by %s: it asks for block_size=%d", FlashMla.name, BLOCK_SIZE)
    own: Work = partial(kernel_for(embed, mla_decode_triton, mla_decode_twin), *inputs)
    contest = Contest("decodes over latents", "attended to", sum(_contexts()))
    return fastest(contest, own, others, timed_on(lane)) if others else None


def _by(library: LatentLibrary, inputs: Inputs) -> Tensor:
    out = library.attend(*inputs)
    if isinstance(library, HopperLatents) and library.spilled:
        raise RuntimeError(f"{library.spilled} registers of a thread lie in memory")
    return out


def _contexts() -> list[int]:
    return [*ODD, *(LONGEST - 37 * s for s in range(NUM_SEQS - len(ODD)))]


def _inputs(spec: LatentSpec, like: Tensor, block_size: int) -> Inputs:
    """Random latents of this layer's sizes, blocks in any order, NaN beyond contexts."""

    def numbers(*shape: int) -> Tensor:
        return like.new_empty(shape).normal_()

    width = -(-LONGEST // block_size)
    q = numbers(NUM_SEQS, spec.num_heads, spec.kv_rank + spec.rope_dim)
    seen = numbers(NUM_SEQS, width, block_size, spec.kv_rank + spec.rope_dim)
    cache = torch.empty_like(seen).flatten(0, 1)
    tables = torch.randperm(NUM_SEQS * width, device=like.device).int().view(NUM_SEQS, width)
    contexts = torch.tensor(_contexts(), dtype=torch.int32, device=like.device)
    beyond = torch.arange(width * block_size, device=like.device) >= contexts[:, None]
    cache[tables.long()] = seen.masked_fill_(beyond.view(*seen.shape[:3], 1), torch.nan)
    starts = torch.arange(NUM_SEQS + 1, dtype=torch.int32, device=like.device)
    decodes = Decodes(tables, contexts, starts, 1)
    plan = plan_mla_decode(decodes, cache, spec.num_heads, spec.kv_rank)
    return q[..., : spec.kv_rank], q[..., spec.kv_rank :], cache, decodes, plan, spec.scale
