"""Choice of what attends for prompts, by the sizes of the first layer: our kernels, or a PromptLibrary."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ....kernels.attention.hopper_prompts import wanted_hopper_prompts
from ....kernels.attention.paged_attention import paged_attention
from ....kernels.attention.paged_batch import NO_OPTIONS, PagedBatch, PromptLibrary
from ....kernels.attention.prompt_library import find_library
from ....kernels.mla.prefill import Chunks, mla_prefill
from ...device.device import Lane
from ...device.kv_cache import KVCache
from ...models.families.spec import LatentSpec
from ...models.layers.decoder import Decoder
from .timed_choice import MOST_TOKENS, Contest, Work, fastest, made_on, timed_on

Others = Sequence[tuple[PromptLibrary, Work]]


def choose_library(lane: Lane, decoder: Decoder, cache: KVCache, max_tokens: int) -> PromptLibrary | None:
    """None: our kernels attend. max_tokens: of a step. No library knows a KV tail."""
    device = decoder.weights.embed.device
    found = find_library(device), wanted_hopper_prompts(device)
    libraries: list[PromptLibrary] = [library for library in found if library is not None]
    if not libraries or cache.tail:
        return None
    num_tokens = max(min(max_tokens, MOST_TOKENS) - 1, 1)  # no whole blocks: behind them is what nobody may read
    own, others = made_on(lane, partial(_both, libraries, decoder, cache, num_tokens))
    contest = Contest("prompts", "attended to", num_tokens)
    return fastest(contest, own, others, timed_on(lane)) if others else None


def _both(libraries: list[PromptLibrary], decoder: Decoder, cache: KVCache, num_tokens: int) -> tuple[Work, Others]:
    layer, embed = decoder.layers[0], decoder.weights.embed
    spec = layer.spec.attention
    if isinstance(spec, LatentSpec):
        return _latent(libraries, spec, embed, num_tokens)
    q = embed.new_empty(num_tokens, spec.num_heads, spec.head_dim).normal_()
    return _paged(libraries, q, cache.parts(layer.kv_id).numbers)


def _paged(libraries: list[PromptLibrary], q: Tensor, stored: Tensor) -> tuple[Work, Others]:
    """Attention of one prompt by our kernel and by the libraries, where NaN is behind it. stored: [num_blocks, 2,
    block_size, K, D]."""
    num_tokens, device, block_size = len(q), q.device, stored.shape[2]
    num_blocks = -(-num_tokens // block_size)
    cache = q.new_empty(num_blocks, *stored.shape[1:]).normal_()
    cache[-1, :, num_tokens - (num_blocks - 1) * block_size :] = torch.nan
    lens = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    table = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
    batch = PagedBatch(table, lens[1:], lens, [num_tokens], [num_tokens], 0, block_size)

    def by(library: PromptLibrary) -> Tensor:
        out = torch.empty_like(q)
        library.attend(q, cache, batch, NO_OPTIONS, out, 0)
        return out

    takes = stored.dtype == q.dtype
    others = [(each, partial(by, each)) for each in libraries if takes and each.takes(q, cache, NO_OPTIONS, None)]
    return lambda: paged_attention(q, cache, batch), others


def _latent(libraries: list[PromptLibrary], spec: LatentSpec, like: Tensor, num_tokens: int) -> tuple[Work, Others]:
    def numbers(*shape: int) -> Tensor:
        return like.new_empty(num_tokens, *shape).normal_()

    q, values = numbers(spec.num_heads, spec.q_dim), numbers(spec.num_heads, spec.value_dim)
    keys, rope_keys = numbers(spec.num_heads, spec.nope_dim), numbers(spec.rope_dim)
    chunks = Chunks([num_tokens], [num_tokens])

    def by(library: PromptLibrary) -> Tensor:
        return library.attend_latent(q, keys, rope_keys, values, chunks, spec.scale)

    others = [(each, partial(by, each)) for each in libraries if each.takes_latent(q, values)]
    return lambda: mla_prefill(q, keys, rope_keys, values, chunks, spec.scale), others
