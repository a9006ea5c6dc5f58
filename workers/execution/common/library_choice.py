"""Choice of what attends for prompts: our kernels, or a PromptLibrary that is there.

No table says it: all are timed at load, on the GPU itself, with random numbers of the sizes of the first layer. One
that gives something else than our kernels is not taken.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ....kernels.attention.hopper_prompts import wanted_hopper_prompts
from ....kernels.attention.paged_attention import paged_attention
from ....kernels.attention.paged_batch import NO_OPTIONS, PagedBatch, PromptLibrary
from ....kernels.attention.prompt_library import find_library
from ....kernels.mla.prefill import Chunks, mla_prefill
from ...device.device import Device, Lane
from ...device.kv_cache import KVCache
from ...models.families.spec import LatentSpec
from ...models.layers.decoder import Decoder

MOST_TOKENS = 4096
NUM_RUNS = 3
TOLERANCE = 2e-2  # of bfloat16 results of random numbers, absolute: two roundings of numbers below 4

log = logging.getLogger("diptych.worker")

Attend = Callable[[], Tensor]
Others = Sequence[tuple[PromptLibrary, Attend]]
Seconds = Callable[[Attend, list[Tensor]], float]  # runs one, puts what it gives into the list; the time that it took


class Named(Protocol):
    @property
    def name(self) -> str: ...


Other = TypeVar("Other", bound=Named)


def choose_library(
    device: Device, lane: Lane, decoder: Decoder, cache: KVCache, max_tokens: int
) -> PromptLibrary | None:
    """None: our kernels attend. max_tokens: of a step."""
    found = find_library(device.torch_device), wanted_hopper_prompts(device.torch_device)
    libraries: list[PromptLibrary] = [library for library in found if library is not None]
    if not libraries:
        return None
    layer, embed = decoder.layers[0], decoder.weights.embed
    spec, num_tokens = layer.spec.attention, min(max_tokens, MOST_TOKENS)
    if isinstance(spec, LatentSpec):
        own, others = _latent(libraries, spec, embed, num_tokens)
    else:
        stored = cache.parts(layer.kv_id).numbers
        own, others = _paged(libraries, embed.new_empty(num_tokens, spec.num_heads, spec.head_dim).normal_(), stored)
    if not others:
        return None
    return fastest(own, others, num_tokens, timed_on(lane))


def timed_on(lane: Lane) -> Seconds:
    """Time what runs on a lane."""

    def seconds(attend: Attend, results: list[Tensor]) -> float:
        began = time.perf_counter()
        lane.run(lambda: results.append(attend()))
        lane.record().wait()
        return time.perf_counter() - began

    return seconds


def _paged(libraries: list[PromptLibrary], q: Tensor, stored: Tensor) -> tuple[Attend, Others]:
    """Attention of one prompt by our kernel and by the libraries. stored: [num_blocks, 2, block_size, K, D]."""
    num_tokens, device, block_size = len(q), q.device, stored.shape[2]
    num_blocks = -(-num_tokens // block_size)
    cache = q.new_empty(num_blocks, *stored.shape[1:]).normal_()
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


def _latent(libraries: list[PromptLibrary], spec: LatentSpec, like: Tensor, num_tokens: int) -> tuple[Attend, Others]:
    def numbers(*shape: int) -> Tensor:
        return like.new_empty(num_tokens, *shape).normal_()

    q, values = numbers(spec.num_heads, spec.q_dim), numbers(spec.num_heads, spec.value_dim)
    keys, rope_keys = numbers(spec.num_heads, spec.nope_dim), numbers(spec.rope_dim)
    chunks = Chunks([num_tokens], [num_tokens])

    def by(library: PromptLibrary) -> Tensor:
        return library.attend_latent(q, keys, rope_keys, values, chunks, spec.scale)

    others = [(each, partial(by, each)) for each in libraries if each.takes_latent(q, values)]
    return lambda: mla_prefill(q, keys, rope_keys, values, chunks, spec.scale), others


def fastest(
    own: Attend, others: Sequence[tuple[Other, Attend]], num_tokens: int, seconds: Seconds, what: str = "prompts"
) -> Other | None:
    """The one of `others` that gives what our kernel does in the least time, if in less than it. what: they attend
    for."""

    def timed(attend: Attend) -> tuple[float, Tensor]:
        results: list[Tensor] = []
        return min(seconds(attend, results) for _ in range(1 + NUM_RUNS)), results[0]

    try:
        own_time, due = timed(own)
    except RuntimeError as e:  # of too little memory, say
        log.warning("%s are attended to by our own kernel: it is compared with no other (%s)", what, e)
        return None
    times: list[tuple[float, Other | None]] = [(own_time, None)]
    for library, attend in others:
        try:
            took, found = timed(attend)
        except RuntimeError as e:
            log.warning("%s are not attended to by %s: it fails (%s)", what, library.name, e)
            continue
        error = float((due.float() - found.float()).abs().max())
        if error <= TOLERANCE:
            times.append((took, library))
        else:
            log.warning("%s are not attended to by %s: its results differ by %.3g", what, library.name, error)
    times.sort(key=lambda each: each[0])
    if len(times) > 1:
        names = ["our own kernel" if library is None else library.name for _, library in times]
        log.info(
            "%s are attended to by %s: %d tokens take %.0f us%s",
            what,
            names[0],
            num_tokens,
            times[0][0] * 1e6,
            "".join(f", by {name} {took * 1e6:.0f} us" for name, (took, _) in zip(names[1:], times[1:], strict=True)),
        )
    return times[0][1]
