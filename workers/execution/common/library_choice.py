"""Choice of what attends for prompts, by the sizes of the first layer: our kernels, or a PromptLibrary (over latents a
LatentPromptLibrary).

Made with the other choices that ask for no KV, before KV gets its memory: what libraries take in a step is measured.
"""

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
from ....kernels.attention.paged_batch import (
    NO_OPTIONS,
    AttentionOptions,
    LatentPromptLibrary,
    PagedBatch,
    PromptLibrary,
)
from ....kernels.mla.cudnn_latents import CudnnLatents, find_cudnn_latents
from ....kernels.mla.prefill import Chunks, mla_prefill
from ...device.device import Lane
from ...device.kv_cache import KVCache
from ...kv.layout import KVLayout
from ...models.families.spec import AttentionSpec, LatentSpec
from ...models.layers.attention import options_of
from ...models.layers.decoder import Decoder
from .expert_library_choice import choose_expert_library
from .product_choice import choose_products
from .timed_choice import MOST_TOKENS, TOLERANCE, Contest, Named, Work, fastest, made_on, timed_on, works

Library = TypeVar("Library", bound=Named)


@dataclass(frozen=True, slots=True)
class PromptLibraries:
    """Libraries that attend for prompts in place of our kernels; None: these do."""

    paged: PromptLibrary | None = None
    latent: LatentPromptLibrary | None = None


OURS = PromptLibraries()


def choose_for_steps(
    lane: Lane, decoder: Decoder, layout: KVLayout, max_tokens: int, max_context: int
) -> PromptLibraries:
    """Choose the libraries of products, of experts, which the decoder's weights keep, and of prompts. layout: of this
    rank's KV; max_tokens: of a step."""
    choose_expert_library(lane, decoder, max_tokens)
    choose_products(lane, decoder, max_tokens)
    return choose_libraries(lane, decoder, layout, max_tokens, max_context)


def choose_libraries(
    lane: Lane, decoder: Decoder, layout: KVLayout, max_tokens: int, max_context: int
) -> PromptLibraries:
    """See choose_for_steps. No library knows a KV tail."""
    if layout.has_tail:
        return OURS
    layer, embed, sizes = decoder.layers[0], decoder.weights.embed, Sizes.of(max_tokens, max_context)
    cache = KVCache(layout, 1, embed.device)
    # No whole blocks: behind them is what nobody may read.
    num_tokens = max(min(max_tokens, max_context, MOST_TOKENS) - 1, 1)
    prepare = partial(_prepare, decoder=decoder, cache=cache)
    if isinstance(spec := layer.spec.attention, LatentSpec):
        latent = find_latent_libraries(embed.device, sizes)
        compare = partial(_latent, latent, spec, embed, num_tokens)
        return PromptLibraries(latent=_choose(lane, compare, num_tokens, prepare) if latent else None)
    paged = find_libraries(embed.device, sizes)
    compare = partial(_paged, paged, spec, embed, cache.parts(layer.kv_id).numbers, num_tokens)
    attends = partial(_attends, lane, decoder, cache, num_tokens)
    return PromptLibraries(paged=_choose(lane, compare, num_tokens, prepare, attends) if paged else None)


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
    attends: Callable[[Library], bool] = lambda _: True,
) -> Library | None:
    """Return the fastest that can be prepared and then attends in every layer; None: our kernel."""
    own, others = made_on(lane, compare)
    contest = Contest("prompts", "attended to", sum(_lengths(num_tokens)[0]))
    while others and (chosen := fastest(contest, own, others, timed_on(lane))) is not None:
        prepared = partial(made_on, lane, partial(prepare, chosen))
        if works(contest.what, contest.done, chosen, prepared) and attends(chosen):
            return chosen
        others = [each for each in others if each[0] is not chosen]
    return None


def _lengths(num_tokens: int) -> tuple[list[int], list[int]]:
    """New tokens and contexts of what is compared: a prompt, and a chunk that has more before it than it is long."""
    chunk = max(num_tokens // 2, 1)
    return [num_tokens, chunk], [num_tokens, chunk + num_tokens]


@dataclass(frozen=True, slots=True, eq=False)
class _Prompts:
    """Input of paged_attention."""

    q: Tensor  # [T, N, D]
    cache: Tensor  # [num_blocks, 2, block_size, K, D]
    batch: PagedBatch
    options: AttentionOptions

    def attend(self) -> Tensor:
        return paged_attention(self.q, self.cache, self.batch, self.options)

    def are_taken_by(self, library: PromptLibrary) -> bool:
        return library.takes(self.q, self.cache, self.options, None)

    def attend_by(self, library: PromptLibrary) -> Tensor:
        out = torch.empty_like(self.q)
        library.attend(self.q, self.cache, self.batch, self.options, out, 0)
        return out


def _prompts(spec: AttentionSpec, like: Tensor, stored: Tensor, num_tokens: int, options: AttentionOptions) -> _Prompts:
    """Random numbers of this layer's sizes, where NaN is behind the contexts. stored: as _Prompts.cache."""
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
    return _Prompts(q, cache, PagedBatch(table, lens, starts, contexts, new, 0, block_size), options)


def _paged(
    libraries: list[PromptLibrary], spec: AttentionSpec, like: Tensor, stored: Tensor, num_tokens: int
) -> tuple[Work, Sequence[tuple[PromptLibrary, Work]]]:
    """Attention by our kernel and by the libraries. stored: as _Prompts.cache."""
    prompts, takes = _prompts(spec, like, stored, num_tokens, NO_OPTIONS), stored.dtype == like.dtype
    others = [(each, partial(prompts.attend_by, each)) for each in libraries if takes and prompts.are_taken_by(each)]
    return prompts.attend, others


def _attends(lane: Lane, decoder: Decoder, cache: KVCache, num_tokens: int, library: PromptLibrary) -> bool:
    """Return whether it attends with the heads, window and logit cap of every layer that it takes, and gives what our
    kernel does: FlashAttention 3 may have been built without some of them, and refuses when it is called."""
    embed, first = decoder.weights.embed, decoder.layers[0].spec.attention
    assert isinstance(first, AttentionSpec)
    done = {_kind(first, 0, 0.0, has_sinks=False)}  # by the comparison before
    for layer in decoder.layers:
        if not isinstance(spec := layer.spec.attention, AttentionSpec):
            continue
        if (kind := _kind(spec, spec.window, spec.softcap, has_sinks=spec.sinks)) in done:
            continue
        done.add(kind)
        # The window is shorter than both contexts: of one that hides nothing a library may make none.
        window = min(spec.window, max(num_tokens // 2, 1))
        options = AttentionOptions(softcap=spec.softcap, window=window, sinks=layer.options.sinks)
        inputs = spec, embed, cache.parts(layer.kv_id).numbers, num_tokens, options
        what = f"prompts ({spec.num_heads} heads of {spec.head_dim}, window {spec.window}, logit cap {spec.softcap:g})"
        if not works(what, "attended to", library, partial(made_on, lane, partial(_check, library, *inputs))):
            return False
    return True


def _check(
    library: PromptLibrary,
    spec: AttentionSpec,
    like: Tensor,
    stored: Tensor,
    num_tokens: int,
    options: AttentionOptions,
) -> None:
    """Device work. Raises RuntimeError where the library gives something else than the kernel here; what it raises
    itself may be any error."""
    prompts = _prompts(spec, like, stored, num_tokens, options)
    if prompts.are_taken_by(library):
        error = float((prompts.attend().float() - prompts.attend_by(library).float()).abs().max())
        if not error <= TOLERANCE:  # nor NaN
            raise RuntimeError(f"its results differ by {error:.3g}")


def _kind(spec: AttentionSpec, window: int, softcap: float, *, has_sinks: bool) -> tuple[float, ...]:
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, window, softcap, has_sinks


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
