"""Choice of what attends for prompts: a library that is installed, or our kernels.

No table says it: both are timed at load, on the GPU itself, with random numbers of the sizes of the first layer. One
that gives something else than our kernels is not taken.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ....kernels.attention.paged_attention import paged_attention
from ....kernels.attention.paged_batch import NO_OPTIONS, PagedBatch, PromptLibrary
from ....kernels.attention.prompt_library import FlashAttention3, find_library
from ....kernels.mla.prefill import Chunks, mla_prefill
from ...device.device import Device, Lane
from ...device.kv_cache import KVCache
from ...models.families.spec import LatentSpec
from ...models.layers.decoder import Decoder

MOST_TOKENS, BLOCK_SIZE = 4096, 16
NUM_RUNS = 3
TOLERANCE = 2e-2  # of bfloat16 results of random numbers, absolute: two roundings of numbers below 4

log = logging.getLogger("diptych.worker")

Attend = Callable[[], Tensor]


class Named(Protocol):
    @property
    def name(self) -> str: ...


Other = TypeVar("Other", bound=Named)


def choose_library(
    device: Device, lane: Lane, decoder: Decoder, cache: KVCache, max_tokens: int
) -> PromptLibrary | None:
    """None: our kernels attend. max_tokens: of a step."""
    library = find_library(device.torch_device)
    if library is None:
        return None
    layer, embed = decoder.layers[0], decoder.weights.embed
    spec, num_tokens = layer.spec.attention, min(max_tokens, MOST_TOKENS)
    if isinstance(spec, LatentSpec):
        both = _latent(library, spec, embed, num_tokens)
    else:
        stored = cache.parts(layer.kv_id).numbers
        both = _paged(library, embed.new_empty(num_tokens, spec.num_heads, spec.head_dim).normal_(), stored)
    if both is None:
        return None

    return faster(library, *both, num_tokens, timed_on(lane))


def timed_on(lane: Lane) -> Callable[[Attend, list[Tensor]], float]:
    """`seconds` of `faster`."""

    def seconds(attend: Attend, results: list[Tensor]) -> float:
        began = time.perf_counter()
        lane.run(lambda: results.append(attend()))
        lane.record().wait()
        return time.perf_counter() - began

    return seconds


def _paged(library: FlashAttention3, q: Tensor, stored: Tensor) -> tuple[Attend, Attend] | None:
    """Attention of one prompt by our kernel and by the library. stored: [num_blocks, 2, block_size, K, D]."""
    num_tokens, device = len(q), q.device
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    cache = q.new_empty(num_blocks, 2, BLOCK_SIZE, *stored.shape[3:]).normal_()
    if stored.dtype != q.dtype or not library.takes(q, cache, NO_OPTIONS, None):
        return None
    lens = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    table = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
    batch = PagedBatch(table, lens[1:], lens, [num_tokens], [num_tokens], 0, BLOCK_SIZE)

    def by_library() -> Tensor:
        out = torch.empty_like(q)
        library.attend(q, cache, batch, NO_OPTIONS, out, 0)
        return out

    return lambda: paged_attention(q, cache, batch), by_library


def _latent(library: FlashAttention3, spec: LatentSpec, like: Tensor, num_tokens: int) -> tuple[Attend, Attend] | None:
    def numbers(*shape: int) -> Tensor:
        return like.new_empty(num_tokens, *shape).normal_()

    q, values = numbers(spec.num_heads, spec.q_dim), numbers(spec.num_heads, spec.value_dim)
    if not library.takes_latent(q, values):
        return None
    keys, rope_keys, chunks = (
        numbers(spec.num_heads, spec.nope_dim),
        numbers(spec.rope_dim),
        Chunks([num_tokens], [num_tokens]),
    )
    return (
        lambda: mla_prefill(q, keys, rope_keys, values, chunks, spec.scale),
        lambda: library.attend_latent(q, keys, rope_keys, values, chunks, spec.scale),
    )


def faster(
    library: Other,
    own: Attend,
    other: Attend,
    num_tokens: int,
    seconds: Callable[[Attend, list[Tensor]], float],
    what: str = "prompts",
) -> Other | None:
    """`library` where it gives what our kernel does, in less time. seconds: runs one of the two, puts what it gives
    into the list, and returns the time that it took. what: they attend for."""
    results: list[list[Tensor]] = [[], []]
    try:
        times = [
            min(seconds(attend, into) for _ in range(1 + NUM_RUNS))
            for attend, into in zip((own, other), results, strict=True)
        ]
    except RuntimeError as e:
        log.warning("%s are not attended to by %s: it fails (%s)", what, library.name, e)
        return None
    error = float((results[0][0].float() - results[1][0].float()).abs().max())
    if not error <= TOLERANCE:
        log.warning("%s are not attended to by %s: its results differ by %.3g", what, library.name, error)
        return None
    names, is_faster = ("our own kernel", library.name), times[1] < times[0]
    log.info(
        "%s are attended to by %s: %d tokens take %.0f us, by %s %.0f us",
        what,
        names[is_faster],
        num_tokens,
        times[is_faster] * 1e6,
        names[not is_faster],
        times[not is_faster] * 1e6,
    )
    return library if is_faster else None
