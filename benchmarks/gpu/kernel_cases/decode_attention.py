"""Decode attention: 32 query and 8 KV heads of 128, as Llama 3.1 8B has, over blocks in random order.

Bytes: K and V of every token that is seen once, the queries and the outputs. Flops: two products for each query head
and token seen, 4 N D.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from diptych.kernels.attention.decode_attention import decode_attention_triton, decode_attention_twin
from diptych.kernels.attention.decode_plan import DecodePlan, Decodes, decode_config, plan_decode, plan_decode_triton
from diptych.kernels.attention.paged_batch import AttentionOptions
from diptych.kernels.common.tuning import chip_of
from diptych.kernels.kv.kv_scales import SCALE_BYTES, numbers_in

from .common import DEVICE, HALF, Case, Goal, Random, in_pool, sized

HEADS, KV_HEADS, DIM = sized((32, 8, 128), (4, 2, 16))
BLOCK_SIZE = sized(16, 8)
HAS_FLASHINFER = find_spec("flashinfer") is not None


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [S * queries, N, D]
    cache: Tensor  # [blocks, 2, block_size, K, D]
    decodes: Decodes
    plan: DecodePlan  # made once a step for all layers: not part of what is timed
    options: AttentionOptions
    scales: Tensor | None = None
    flashinfer: Callable[[], Tensor] | None = None  # where it is installed


def make(
    seed: int, num_seqs: int, context: int, queries: int = 1, window: int = 0, stored: torch.dtype | None = None
) -> Inputs:
    random = Random(seed)
    width = context // BLOCK_SIZE
    assert width * BLOCK_SIZE == context
    cache, scales = random.normal(num_seqs * width, 2, BLOCK_SIZE, KV_HEADS, DIM), None
    if stored is not None:
        cache, scales = in_pool(cache, stored)
    decodes = Decodes(
        random.order(num_seqs * width).int().view(num_seqs, width),
        torch.full((num_seqs,), context, dtype=torch.int32, device=DEVICE),
        torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * queries,
        queries,
    )
    plan = plan_decode(decodes, KV_HEADS, decode_config(chip_of(DEVICE), cache), window)
    q = random.normal(num_seqs * queries, HEADS, DIM)
    is_plain = queries == 1 and not window and stored is None
    other = flashinfer(q, cache, decodes.block_tables) if is_plain and HAS_FLASHINFER else None
    return Inputs(q, cache, decodes, plan, AttentionOptions(window=window), scales, other)


def run(x: Inputs) -> Tensor:
    return decode_attention_triton(x.q, x.cache, x.decodes, x.plan, x.options, x.scales)


def reference(x: Inputs, _: object) -> Tensor:
    return decode_attention_twin(x.q, x.cache, x.decodes, x.plan, x.options, x.scales)


def unsplit(x: Inputs) -> Tensor:
    """Each context by one program for each KV head: the plan for a single program."""
    plan = plan_decode_triton(x.decodes, 1, len(x.decodes.context_lens) + 1, x.plan.slots)
    return run(dataclasses.replace(x, plan=plan))


def gather_sdpa(x: Inputs) -> Tensor:
    """Compute attention for one query a sequence. The query heads of a KV head are the rows of one small matrix: no KV
    head is repeated."""
    num_seqs = len(x.decodes.context_lens)
    blocks = x.decodes.block_tables.view(-1)
    keys, values = (
        x.cache[:, which].index_select(0, blocks).view(num_seqs, -1, KV_HEADS, DIM).transpose(1, 2) for which in (0, 1)
    )
    grouped = x.q.view(num_seqs, KV_HEADS, HEADS // KV_HEADS, DIM)
    return scaled_dot_product_attention(grouped, keys, values).reshape(x.q.shape)


def flashinfer(q: Tensor, cache: Tensor, tables: Tensor) -> Callable[[], Tensor]:
    """The call that is timed, planned for these inputs."""
    import flashinfer as library

    num_seqs, width = tables.shape
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE), "NHD"
    )
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * width
    last = torch.full((num_seqs,), BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
    wrapper.plan(starts, tables.view(-1), last, HEADS, KV_HEADS, DIM, BLOCK_SIZE, q_data_type=HALF, kv_data_type=HALF)
    return lambda: wrapper.run(q, cache)


def case(
    num_seqs: int,
    context: int,
    queries: int = 1,
    window: int = 0,
    stored: torch.dtype | None = None,
    goals: tuple[Goal, ...] = (),
) -> Case:
    name = "int4" if stored == torch.uint8 else str(stored).removeprefix("torch.")
    kind = "decode attention" if stored is None else f"decode attention, {name} KV"
    seen = num_seqs * min(context, window + queries - 1 if window else context)
    bytes_of_number = HALF.itemsize if stored is None else 1 / numbers_in(stored) + SCALE_BYTES / DIM
    peers: dict[str, Callable[[Inputs], object]] = {}
    if queries == 1 and not window and stored is None:
        peers = {"gather + SDPA": gather_sdpa, "unsplit": unsplit}
        if HAS_FLASHINFER:
            peers["FlashInfer"] = lambda x: x.flashinfer and x.flashinfer()
    rows = 2 * HALF.itemsize * num_seqs * queries * HEADS * DIM
    return Case(
        kind,
        f"{num_seqs} x {context}"
        + (f", {queries} queries" if queries > 1 else "")
        + (f", window {window}" if window else ""),
        lambda seed: make(seed, num_seqs, context, queries, window, stored),
        run,
        reference,
        2 * seen * KV_HEADS * DIM * bytes_of_number + rows,
        4.0 * seen * queries * HEADS * DIM,
        peers=peers,
        goals=goals,
    )


def cases() -> Iterator[Case]:
    batch = (Goal("copy", 0.75, 0.90), Goal("gather + SDPA", 5.0, 5.0))
    yield case(*sized((64, 1024), (3, 24)), goals=batch)
    yield case(*sized((32, 8192), (2, 72)), goals=batch)
    yield case(*sized((1, 32768), (1, 136)), goals=(Goal("copy", 0.50, 0.75), Goal("unsplit", 4.0, 4.0)))
    yield case(*sized((1, 131072), (1, 200)))
    yield case(*sized((64, 4096), (2, 40)), queries=4)
    yield case(*sized((32, 16384), (2, 72)), window=sized(4096, 40))
    for stored in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        yield case(*sized((64, 4096), (2, 40)), stored=stored)
    for stored in (torch.int8, torch.uint8):
        yield case(*sized((1, 65536), (1, 136)), stored=stored)
