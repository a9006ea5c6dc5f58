"""Choice of what attends for prompts, by the sizes of the first layer: our kernels, or a PromptLibrary (over latents a
LatentPromptLibrary)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ....kernels.attention.hopper_prompts import wanted_hopper_prompts
from ....kernels.attention.libraries.cudnn_calls import Sizes
from ....kernels.attention.libraries.cudnn_prompts import CudnnPrompts, find_cudnn_prompts
from ....kernels.attention.libraries.prompt_library import find_library
from ....kernels.attention.paged_attention import paged_attention
from ....kernels.attention.paged_batch import NO_OPTIONS, LatentPromptLibrary, PagedBatch, PromptLibrary
from ....kernels.mla.cudnn_latents import CudnnLatents, find_cudnn_latents
from ....kernels.mla.prefill import Chunks, mla_prefill
from ...device.device import Lane
from ...device.kv_cache import KVCache
from ...models.families.spec import AttentionSpec, LatentSpec
from ...models.layers.attention import options_of
from ...models.layers.decoder import Decoder
from .timed_choice import MOST_TOKENS, Contest, Named, Work, fastest, made_on, timed_on, works

Library = TypeVar("Library", bound=Named)


@dataclass(frozen=True, slots=True)
class PromptLibraries:
    """Libraries that attend for prompts in place of our kernels; None: these do."""

    paged: PromptLibrary | None = None
    latent: LatentPromptLibrary | None = None


OURS = PromptLibraries()


def choose_libraries(
    lane: Lane, decoder: Decoder, cache: KVCache, max_tokens: int, max_context: int
) -> PromptLibraries:
    """max_tokens: of a step. No library knows a KV tail."""
    if cache.tail:
        return OURS
    layer, embed, sizes = decoder.layers[0], decoder.weights.embed, Sizes.of(max_tokens, max_context)
    # No whole blocks: behind them is what nobody may read.
    num_tokens = max(min(max_tokens, max_context, MOST_TOKENS) - 1, 1)
    prepare = partial(_prepare, decoder=decoder, cache=cache)
    if isinstance(spec := layer.spec.attention, LatentSpec):
        latent = find_latent_libraries(embed.device, sizes)
        compare = partial(_latent, latent, spec, embed, num_tokens)
        return PromptLibraries(latent=_choose(lane, compare, num_tokens, prepare) if latent else None)
    paged = find_libraries(embed.device, sizes)
    compare = partial(_paged, paged, spec, embed, cache.parts(layer.kv_id).numbers, num_tokens)
    return PromptLibraries(paged=_choose(lane, compare, num_tokens, prepare) if paged else None)


def find_libraries(device: torch.device, sizes: Sizes) -> list[PromptLibrary]:
    """Return all that are there. sizes: of sequences, for cuDNN."""
    found = find_library(device), find_cudnn_prompts(device, sizes), wanted_hopper_prompts(device)
    return [library for library in found if library is not None]


def find_latent_libraries(device: torch.device, sizes: Sizes) -> list[LatentPromptLibrary]:
    """See find_libraries."""
    found = find_library(device), find_cudnn_latents(device, sizes)
    return [library for library in found if library is not None]


def _choose(
    lane: Lane,
    compare: Callable[[], tuple[Work, Sequence[tuple[Library, Work]]]],
    num_tokens: int,
    prepare: Callable[[Library], None],
) -> Library | None:
    own, others = made_on(lane, compare)
    contest = Contest("prompts", "attended to", sum(_lengths(num_tokens)[0]))
    chosen = fastest(contest, own, others, timed_on(lane)) if others else None
    if chosen is None:
        return None
    is_ready = works(contest.what, contest.done, chosen, partial(made_on, lane, partial(prepare, chosen)))
    return chosen if is_ready else None


def _lengths(num_tokens: int) -> tuple[list[int], list[int]]:
    """New tokens and contexts of what is compared: a prompt, and a chunk that has more before it than it is long."""
    chunk = max(num_tokens // 2, 1)
    return [num_tokens, chunk], [num_tokens, chunk + num_tokens]


def _paged(
    libraries: list[PromptLibrary], spec: AttentionSpec, like: Tensor, stored: Tensor, num_tokens: int
) -> tuple[Work, Sequence[tuple[PromptLibrary, Work]]]:
    """Attention by our kernel and by the libraries, where NaN is behind the contexts. stored: [num_blocks, 2,
    block_size, K, D]."""
    (new, contexts), device, block_size = _lengths(num_tokens), like.device, stored.shape[2]
    q = like.new_empty(sum(new), spec.num_heads, spec.head_dim).normal_()
    widths = [-(-context // block_size) for context in contexts]
    cache = q.new_empty(sum(widths), *stored.shape[1:]).normal_()
    table = torch.zeros(2, max(widths), dtype=torch.int32, device=device)
    for row, context, first, width in zip(table, contexts, (0, widths[0]), widths, strict=True):
        row[:width] = torch.arange(first, first + width, dtype=torch.int32, device=device)
        cache[first + width - 1, :, context - (width - 1) * block_size :] = torch.nan
    lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    starts = torch.tensor([0, new[0], sum(new)], dtype=torch.int32, device=device)
    batch = PagedBatch(table, lens, starts, contexts, new, 0, block_size)

    def by(library: PromptLibrary) -> Tensor:
        out = torch.empty_like(q)
        library.attend(q, cache, batch, NO_OPTIONS, out, 0)
        return out

    takes = stored.dtype == q.dtype
    others = [(each, partial(by, each)) for each in libraries if takes and each.takes(q, cache, NO_OPTIONS, None)]
    return lambda: paged_attention(q, cache, batch), others


def _latent(
    libraries: list[LatentPromptLibrary], spec: LatentSpec, like: Tensor, num_tokens: int
) -> tuple[Work, Sequence[tuple[LatentPromptLibrary, Work]]]:
    new, contexts = _lengths(num_tokens)

    def numbers(rows: list[int], *shape: int) -> Tensor:
        return like.new_empty(sum(rows), *shape).normal_()

    q, values = numbers(new, spec.num_heads, spec.q_dim), numbers(contexts, spec.num_heads, spec.value_dim)
    keys, rope_keys = numbers(contexts, spec.num_heads, spec.nope_dim), numbers(contexts, spec.rope_dim)
    chunks = Chunks(new, contexts)

    def by(library: LatentPromptLibrary) -> Tensor:
        return library.attend_latent(q, keys, rope_keys, values, chunks, spec.scale)

    others = [(each, partial(by, each)) for each in libraries if each.takes_latent(q, values)]
    return lambda: mla_prefill(q, keys, rope_keys, values, chunks, spec.scale), others


def _prepare(library: Named, decoder: Decoder, cache: KVCache) -> None:
    """Device work: what would else be done when the first request comes, for the heads of each layer that it takes."""
    embed = decoder.weights.embed
    for layer in decoder.layers:
        spec = layer.spec.attention
        if isinstance(library, CudnnLatents) and isinstance(spec, LatentSpec):
            library.prepare(embed.new_zeros(1, spec.num_heads, spec.q_dim), spec.scale)
        elif isinstance(library, CudnnPrompts) and isinstance(spec, AttentionSpec):
            q, stored = embed.new_zeros(1, spec.num_heads, spec.head_dim), cache.parts(layer.kv_id).numbers
            if library.knows(q, stored, options_of(spec, layer.weights)):
                library.prepare(q, stored, spec.scale)
