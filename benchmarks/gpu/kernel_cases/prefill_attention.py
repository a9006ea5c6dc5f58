"""Prefill attention: 32 query and 8 KV heads of 128, over blocks in random order.

Flops: two products for each query head and pair of tokens that see each other, 4 N D; what is masked is not counted.
Bytes: queries, outputs, and K and V of every token once. SDPA has its K and V in order and a head of them for every
query head, made beforehand: of its time, none goes to gathering. "cuDNN" is the library as workers call it, with its
copies and its thread.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from diptych.kernels.attention.hopper_prompts import CONFIGS, find_hopper_prompts
from diptych.kernels.attention.libraries.cudnn_calls import Sizes
from diptych.kernels.attention.libraries.cudnn_prompts import find_cudnn_prompts
from diptych.kernels.attention.libraries.prompt_library import find_library
from diptych.kernels.attention.paged_batch import AttentionOptions, PagedBatch, PromptLibrary
from diptych.kernels.attention.prefill_attention import prefill_attention_triton
from diptych.kernels.kv.kv_scales import SCALE_BYTES, dequantise

from .common import DEVICE, HALF, IS_TINY, Case, Goal, Random, Tensors, in_pool, sized

HEADS, KV_HEADS, DIM = sized((32, 8, 128), (4, 2, 64))
BLOCK_SIZE = sized(16, 8)
HAS_FLASHINFER = find_spec("flashinfer") is not None
# Those that attend in place of our kernel; of the one for Hopper every configuration, whatever the environment says.
FOUND = (
    find_library(DEVICE),
    find_cudnn_prompts(DEVICE, Sizes.of(8192, 16384)),
    *(find_hopper_prompts(DEVICE, config) for config in CONFIGS),
)
LIBRARIES: list[PromptLibrary] = [found for found in FOUND if found is not None]
# Where Triton is interpreted there is no GPU, and SDPA has what the CPU has.
BACKENDS = (
    {"SDPA math": SDPBackend.MATH}
    if IS_TINY
    else {
        "SDPA flash": SDPBackend.FLASH_ATTENTION,
        "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
        "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
)


@dataclass(frozen=True)
class Inputs:
    """Inputs of S sequences of `num_new` new tokens each, the last of `context` ones."""

    q: Tensor  # [S * num_new, N, D]
    cache: Tensor  # [blocks, 2, block_size, K, D]
    batch: PagedBatch
    options: AttentionOptions
    scales: Tensor | None
    in_order: tuple[Tensor, Tensor, Tensor]  # [S, N, tokens, D]: queries, and K and V of every query head
    seen: Tensor | None  # [num_new, context] bool, where there is a window
    flashinfer: Callable[[], Tensor] | None  # where it is installed


def make(
    seed: int, num_seqs: int, num_new: int, context: int, window: int = 0, stored: torch.dtype | None = None
) -> Inputs:
    random = Random(seed)
    width = context // BLOCK_SIZE
    assert width * BLOCK_SIZE == context
    cache, scales = random.normal(num_seqs * width, 2, BLOCK_SIZE, KV_HEADS, DIM), None
    dense = cache
    if stored is not None:
        cache, scales = made = in_pool(cache, stored)
        assert made.scales is not None
        dense = dequantise(cache, made.scales).to(HALF)
    tables = random.order(num_seqs * width).int().view(num_seqs, width)
    batch = PagedBatch(
        tables,
        torch.full((num_seqs,), context, dtype=torch.int32, device=DEVICE),
        torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * num_new,
        [context] * num_seqs,
        [num_new] * num_seqs,
        0,
        BLOCK_SIZE,
    )
    q = random.normal(num_seqs * num_new, HEADS, DIM)
    in_blocks = dense[tables.view(-1).long()].view(num_seqs, width, 2, BLOCK_SIZE, KV_HEADS, DIM)
    keys, values = (
        in_blocks[:, :, which].flatten(1, 2).transpose(1, 2).repeat_interleave(HEADS // KV_HEADS, 1) for which in (0, 1)
    )
    queries = q.view(num_seqs, num_new, HEADS, DIM).transpose(1, 2).contiguous()
    seen = None
    if window:
        seen = torch.ones(num_new, context, dtype=torch.bool, device=DEVICE).tril_(context - num_new)
        seen.triu_(context - num_new - window + 1)
    is_plain = num_new == context and not window and stored is None
    other = flashinfer(q, cache, batch) if is_plain and HAS_FLASHINFER else None
    return Inputs(q, cache, batch, AttentionOptions(window=window), scales, (queries, keys, values), seen, other)


def run(x: Inputs) -> Tensor:
    return prefill_attention_triton(x.q, x.cache, x.batch, x.options, x.scales)


def sdpa(x: Inputs) -> Tensor:
    """Compute attention by whichever backend torch takes."""
    queries, keys, values = x.in_order
    mask = x.seen
    if mask is None and queries.shape[2] < keys.shape[2]:
        mask = causal_lower_right(queries.shape[2], keys.shape[2])
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).reshape(x.q.shape)


def sdpa_of(backend: SDPBackend) -> Callable[[Inputs], Tensor]:
    def by_backend(x: Inputs) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(x)

    return by_backend


def reference(x: Inputs, _: object) -> Tensors:
    return sdpa(x)


def flashinfer(q: Tensor, cache: Tensor, batch: PagedBatch) -> Callable[[], Tensor]:
    """The call that is timed, planned for these inputs."""
    import flashinfer as library

    num_seqs, width = batch.block_tables.shape
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE), "NHD"
    )
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * width
    last = torch.full((num_seqs,), BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
    places = batch.query_starts, starts, batch.block_tables.view(-1), last
    wrapper.plan(*places, HEADS, KV_HEADS, DIM, BLOCK_SIZE, causal=True, q_data_type=HALF)
    return lambda: wrapper.run(q, cache)


def by(library: PromptLibrary) -> Callable[[Inputs], Tensor]:
    def by_library(x: Inputs) -> Tensor:
        assert library.takes(x.q, x.cache, x.options, x.scales)
        out = torch.empty_like(x.q)
        library.attend(x.q, x.cache, x.batch, x.options, out, 0)
        return out

    return by_library


def pairs_of(num_new: int, context: int, window: int) -> int:
    """Number of pairs of a query and a token that it sees."""
    history = context - num_new
    return sum(min(history + t + 1, window or context) for t in range(num_new))


def case(
    num_seqs: int,
    num_new: int,
    context: int,
    window: int = 0,
    stored: torch.dtype | None = None,
    goals: tuple[Goal, ...] = (),
) -> Case:
    kind = "prefill attention" if stored is None else f"prefill attention, {str(stored).removeprefix('torch.')} KV"
    peers: dict[str, Callable[[Inputs], object]] = {}
    if stored is None and num_new == context and not window:
        peers = {name: sdpa_of(backend) for name, backend in BACKENDS.items()}
        if HAS_FLASHINFER:
            peers["FlashInfer"] = lambda x: x.flashinfer and x.flashinfer()
    else:
        peers = {"SDPA of what torch takes": sdpa}
    if stored is None:
        peers |= {library.name: by(library) for library in LIBRARIES if not (window and library.name == "cuDNN")}
    seen = num_seqs * min(context, num_new + window if window else context)
    kv_bytes = 2 * seen * KV_HEADS * DIM * (HALF.itemsize if stored is None else stored.itemsize + SCALE_BYTES / DIM)
    return Case(
        kind,
        f"{num_seqs} x {num_new}"
        + (f" after {context - num_new}" if context > num_new else "")
        + (f", window {window}" if window else ""),
        lambda seed: make(seed, num_seqs, num_new, context, window, stored),
        run,
        reference,
        kv_bytes + 2 * HALF.itemsize * num_seqs * num_new * HEADS * DIM,
        4.0 * num_seqs * pairs_of(num_new, context, window) * HEADS * DIM,
        peers=peers,
        goals=goals,
    )


def cases() -> Iterator[Case]:
    causal = (Goal("TFLOP/s", 450.0, 600.0), Goal("SDPA", 0.75, 0.95))
    yield case(*sized((1, 8192, 8192), (1, 24, 24)), goals=causal)
    yield case(*sized((4, 8192, 8192), (2, 16, 16)), goals=causal)
    yield case(*sized((16, 1024, 1024), (3, 8, 8)))
    yield case(*sized((1, 2048, 16384), (1, 16, 40)))
    yield case(*sized((1, 8192, 8192), (1, 24, 24)), window=sized(1024, 12))
    yield case(*sized((1, 2048, 16384), (1, 16, 40)), window=sized(4096, 30))
    for stored in (torch.int8, torch.float8_e4m3fn):
        yield case(*sized((1, 2048, 8192), (1, 16, 40)), stored=stored)
    if IS_TINY:  # peers are not launched with these
        for library in LIBRARIES:
            for shape in ((2, 200, 400, 0), (1, 300, 400, 130)):
                yield replace(case(*shape), kernel=f"prefill attention by {library.name}", run=by(library), peers={})
