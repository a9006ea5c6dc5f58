"""Whole hand-offs between pools of which one or both are on a fake device: layouts, and their known numbers."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from diptych.workers.common.errors import DiptychError
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.handoff.pull import PullResult
from diptych.workers.handoff.segment_receiver import DEFAULT_PULL_SETTINGS, PullSettings
from diptych.workers.kv.device_kv import DeviceKV
from diptych.workers.kv.layout import DOT, LAYER_MAJOR, ROWS, SCALES_LAST, KVLayout
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.packing import Pool, unpacked
from diptych.workers.kv.staging import Staging
from diptych.workers.kv.wire import STORAGE, Numbers, row_size, widen
from diptych.workers.transport.select import make_transports

from ..handoff_pair import (
    SinkEngine,
    make_memory,
    receive,
    seal_event,
    serve,
    start,
    until_quiet,
)
from .fake_cuda import STAGING_BYTES, FakeCuda, make_device_memory, seen_by_host

LAYOUT = KVLayout("float32", block_size=16, num_layers=3, num_kv_heads=4, head_dim=16, model_id="m")
NUM_TOKENS = 70
BLOCKS = {16: (6, 7, 1, 4, 3), 4: tuple(range(19, 1, -1))}  # of the source, by block size
BF16 = replace(LAYOUT, dtype="bfloat16")
DOT_BF16 = replace(BF16, packing=DOT)
LATENT = replace(LAYOUT, num_kv_heads=1, head_dim=40, num_vectors=1)
UNLIKE = replace(LAYOUT, layer_shapes=((4, 16), (4, 16), (2, 40)))
TWO = replace(LAYOUT, tensor_parallel=2)
DRAFTED = replace(UNLIKE, layer_shapes=((4, 16), (4, 16), (2, 32)), num_draft_layers=1, draft_id="d")
KEYS_BESIDE_LATENTS = replace(
    LATENT, layer_shapes=((1, 40), (1, 40), (2, 32)), num_draft_layers=1, draft_id="d", draft_num_vectors=2
)
INT8 = replace(LAYOUT, dtype="int8", packing=SCALES_LAST)  # as GPUs have it; CPUs: in rows, or dot
FP8 = replace(INT8, dtype="fp8")
ROWS_INT8, DOT_FP8 = replace(INT8, packing=ROWS), replace(FP8, packing=DOT)
TWO_INT8, TWO_FP8 = (replace(of, tensor_parallel=2) for of in (INT8, FP8))
DRAFTED_INT8 = replace(DRAFTED, dtype="int8", packing=SCALES_LAST)
EQUAL = LAYOUT, LAYOUT
# name: source, sink, on a device: source, sink
PAIRS = {
    "equal": (*EQUAL, True, True),
    "onto a layer-major pool": (LAYOUT, replace(LAYOUT, axis_order=LAYER_MAJOR), True, True),
    "off a layer-major pool": (replace(LAYOUT, axis_order=LAYER_MAJOR), replace(LAYOUT, block_size=4), True, True),
    "smaller blocks, bfloat16": (LAYOUT, replace(BF16, block_size=4), True, True),
    "larger blocks, float32": (replace(BF16, block_size=4), replace(LAYOUT, block_size=64), True, True),
    "off a device": (*EQUAL, True, False),
    "off a device, into dot": (LAYOUT, DOT_BF16, True, False),
    "onto a device": (*EQUAL, False, True),
    "dot onto a device": (DOT_BF16, replace(LAYOUT, block_size=4), False, True),
    "dot, layer-major, two ranks, onto a device": (
        replace(LAYOUT, packing=DOT, axis_order=LAYER_MAJOR, tensor_parallel=2),
        BF16,
        False,
        True,
    ),
    "replicated heads onto a device": (replace(LAYOUT, tensor_parallel=8), LAYOUT, False, True),
    "latents": (LATENT, LATENT, True, True),
    "latents, layer-major, into smaller blocks": (
        replace(LATENT, axis_order=LAYER_MAJOR),
        replace(LATENT, dtype="bfloat16", block_size=4),
        True,
        True,
    ),
    "latents of two ranks onto a device": (replace(LATENT, tensor_parallel=2), LATENT, False, True),
    "latents off a device": (LATENT, replace(LATENT, block_size=4), True, False),
    "unlike layers": (UNLIKE, UNLIKE, True, True),
    "unlike layers, layer-major, into smaller blocks": (
        replace(UNLIKE, axis_order=LAYER_MAJOR),
        replace(UNLIKE, dtype="bfloat16", block_size=4),
        True,
        True,
    ),
    "unlike layers of two ranks onto a device": (replace(UNLIKE, tensor_parallel=2), UNLIKE, False, True),
    "unlike layers off a device": (UNLIKE, replace(UNLIKE, block_size=4), True, False),
    "a target and its draft": (DRAFTED, replace(DRAFTED, block_size=4), True, True),
    "dot, of a target and its draft, onto a device": (
        replace(DRAFTED, packing=DOT, dtype="bfloat16", tensor_parallel=2),
        replace(DRAFTED, block_size=4, axis_order=LAYER_MAJOR),
        False,
        True,
    ),
    "a draft of two ranks' first alone": (
        replace(DRAFTED, tensor_parallel=2, draft_tensor_parallel=1),
        replace(DRAFTED, block_size=4),
        True,
        True,
    ),
    "a draft onto two ranks' first alone": (
        DRAFTED,
        replace(DRAFTED, tensor_parallel=2, draft_tensor_parallel=1),
        True,
        True,
    ),
    "latents and a draft's keys onto two ranks": (
        replace(KEYS_BESIDE_LATENTS, block_size=4),
        replace(KEYS_BESIDE_LATENTS, tensor_parallel=2, draft_tensor_parallel=1, axis_order=LAYER_MAJOR),
        True,
        True,
    ),
    "latents and a draft's keys off a device": (KEYS_BESIDE_LATENTS, KEYS_BESIDE_LATENTS, True, False),
    "two ranks onto one": (TWO, LAYOUT, True, True),
    "one onto two, layer-major, of smaller blocks": (
        BF16,
        replace(TWO, axis_order=LAYER_MAJOR, block_size=4),
        True,
        True,
    ),
    "two ranks off a device": (replace(TWO, axis_order=LAYER_MAJOR), DOT_BF16, True, False),
    "dot onto two ranks": (DOT_BF16, TWO, False, True),
    "two ranks onto eight, which replicate heads": (TWO, replace(LAYOUT, tensor_parallel=8), True, True),
    "unlike layers onto two ranks": (UNLIKE, replace(UNLIKE, tensor_parallel=2), True, True),
    "int8": (INT8, INT8, True, True),
    "fp8 onto a layer-major pool": (FP8, replace(FP8, axis_order=LAYER_MAJOR), True, True),
    "int8 into smaller blocks": (INT8, replace(INT8, block_size=4), True, True),
    "fp8, layer-major, into larger blocks": (
        replace(FP8, axis_order=LAYER_MAJOR, block_size=4),
        replace(FP8, block_size=64),
        True,
        True,
    ),
    "int8 of two ranks": (TWO_INT8, TWO_INT8, True, True),
    "int8 of two ranks onto one": (TWO_INT8, INT8, True, True),
    "fp8 onto two ranks, layer-major, of smaller blocks": (
        FP8,
        replace(TWO_FP8, axis_order=LAYER_MAJOR, block_size=4),
        True,
        True,
    ),
    "int8 onto eight ranks, which replicate heads": (INT8, replace(INT8, tensor_parallel=8), True, True),
    "int8 of a target and its draft": (DRAFTED_INT8, replace(DRAFTED_INT8, block_size=4), True, True),
    "int8 of a target and its draft, of equal pools": (DRAFTED_INT8, DRAFTED_INT8, True, True),
    "int8 off a device": (INT8, ROWS_INT8, True, False),
    "int8 of two ranks off a device, into smaller blocks": (TWO_INT8, replace(ROWS_INT8, block_size=4), True, False),
    "int8 onto a device": (ROWS_INT8, replace(INT8, axis_order=LAYER_MAJOR), False, True),
    "int8 onto two ranks of smaller blocks on a device": (ROWS_INT8, replace(TWO_INT8, block_size=4), False, True),
    "fp8 off a device, into dot": (FP8, DOT_FP8, True, False),
    "fp8 in dot onto two ranks on a device": (DOT_FP8, TWO_FP8, False, True),
    "float32 to int8": (LAYOUT, INT8, True, True),
    "bfloat16 to fp8, in smaller blocks": (BF16, replace(FP8, block_size=4), True, True),
    "two ranks of float32 to int8": (TWO, INT8, True, True),
    "int8 to float32, on two ranks": (INT8, TWO, True, True),
    "fp8 to bfloat16, in smaller blocks": (FP8, replace(BF16, block_size=4), True, True),
    "int8 to fp8": (INT8, FP8, True, True),
    "int8 off a device, to float32": (INT8, LAYOUT, True, False),
    "fp8 off a device, to bfloat16 in dot": (FP8, DOT_BF16, True, False),
    "float32 onto a device, to fp8": (LAYOUT, FP8, False, True),
    "bfloat16 in dot onto a device, to int8": (DOT_BF16, replace(INT8, block_size=4), False, True),
    "int8 onto a device, to bfloat16": (ROWS_INT8, BF16, False, True),
    "float32 off a device, to fp8 in dot": (LAYOUT, DOT_FP8, True, False),
}


def known_rows(layout: KVLayout = LAYOUT) -> Numbers:
    """[token, numbers of all layers] float32: integers that bfloat16 can represent; each identifies its place."""
    groups = [group.uniform for group in layout.layer_groups(0, layout.num_layers) for _ in group.layers]
    shape = NUM_TOKENS, sum(of.num_vectors * of.num_kv_heads * of.head_dim for of in groups)
    return (np.arange(np.prod(shape)) % 251).astype(np.float32).reshape(shape)


def as_stored(rows: Numbers, dtype: str, head_dim: int) -> Numbers:
    """rows: [token, numbers] float32. Returns [token, elements]: vectors with their scales, of a scaled dtype."""
    vectors = np.ascontiguousarray(rows.reshape(-1, head_dim))
    return widen(vectors.tobytes(), "float32", dtype, head_dim).reshape(len(rows), -1)


def due_rows(theirs: KVLayout, ours: KVLayout) -> Numbers:
    """Return what `load` is to give: `known_rows`, rounded where a pool is narrower, once in each; a scaled dtype that
    both have is not rounded again."""
    found, first, rows = list[Numbers](), 0, known_rows(ours)
    for group in ours.layer_groups(0, ours.num_layers):
        dim = group.uniform.head_dim
        end = first + len(group.layers) * group.uniform.num_vectors * group.uniform.num_kv_heads * dim
        sent = as_stored(rows[:, first:end], theirs.dtype, dim)
        found.append(widen(sent.tobytes(), theirs.dtype, ours.dtype, dim).reshape(NUM_TOKENS, -1))
        first = end
    return to_floats(np.concatenate(found, axis=1))


def to_floats(stored: Numbers) -> Numbers:
    return (stored.astype(np.uint32) << 16).view(np.float32) if stored.dtype == np.uint16 else stored


def store(memory: KVMemory, table: tuple[int, ...], rows: Numbers) -> None:
    layout, first = memory.layout, 0
    for group in layout.layer_groups(0, layout.num_layers):
        of, pool, layers = group.uniform, Pool(memory, group), slice(0, len(group.layers))
        sizes = layers.stop, of.num_vectors, 1, of.num_kv_heads, row_size(of.dtype, of.head_dim)
        end = first + int(np.prod(sizes[:-1])) * of.head_dim
        for token, row in enumerate(as_stored(rows[:, first:end], layout.dtype, of.head_dim)):
            block, slot = table[token // of.block_size], token % of.block_size
            for rank in range(of.tensor_parallel):
                heads = slice(of.first_head(rank), of.first_head(rank) + of.heads_per_rank)
                own = slice(0, of.heads_per_rank)
                pool.write(rank, block, layers, own, slot, row.reshape(sizes)[:, :, :, heads])
        first = end


def load(memory: KVMemory, table: tuple[int, ...]) -> Numbers:
    """[token, elements] float32, or bytes of a scaled dtype, of whole heads; ranks that have the same must have the
    same of it."""
    layout = memory.layout
    assert memory.region.view is not None
    if not layout.layer_shapes:
        ranks = np.frombuffer(memory.region.view, np.uint8).reshape(layout.tensor_parallel, -1)
        firsts = {layout.first_head(rank): rank for rank in layout.distinct_ranks}
        assert all(np.array_equal(of, ranks[firsts[layout.first_head(rank)]]) for rank, of in enumerate(ranks))
    numbers, parts = np.frombuffer(memory.region.view, STORAGE[layout.dtype]), list[Numbers]()
    for group in layout.layer_groups(0, layout.num_layers):
        of, size = group.uniform, group.uniform.layer_bytes // numbers.itemsize
        starts = layout.offsets(group, memory.num_blocks, table).reshape(-1) // numbers.itemsize
        pieces = np.stack([numbers[start : start + size] for start in starts])
        outer, inner = (len(of.distinct_ranks), len(table), -1), (of.num_vectors, of.block_size)
        heads = of.heads_per_rank * row_size(of.dtype, of.head_dim)
        blocks = (pieces if of.packing == ROWS else unpacked(pieces, of)).reshape(*outer, *inner, heads)
        parts.append(blocks.transpose(1, 4, 2, 3, 0, 5).reshape(len(table) * of.block_size, -1)[:NUM_TOKENS])
    return to_floats(np.concatenate(parts, axis=1))


@dataclass
class Case:
    theirs: KVLayout
    ours: KVLayout
    source_on_device: bool = True
    sink_on_device: bool = True
    transport: str = "cuda_ipc"
    settings: PullSettings = DEFAULT_PULL_SETTINGS
    is_late: bool = True
    source_cuda: FakeCuda = field(default_factory=FakeCuda)
    sink_cuda: FakeCuda = field(default_factory=FakeCuda)

    def memory(self, layout: KVLayout, num_blocks: int, driver: FakeCuda | None) -> KVMemory:
        if driver is None:
            return make_memory(layout, num_blocks)
        return make_device_memory(layout, num_blocks, driver=driver, device=FakeDevice(is_late=self.is_late))


def looked_at(memory: KVMemory) -> KVMemory:
    return memory if memory.device is None else seen_by_host(memory)


def staging_of(device: DeviceKV | None) -> Staging:
    return device.staging if device is not None else Staging(STAGING_BYTES)


async def hand_over(
    case: Case, spoil: Callable[[KVMemory], None] = lambda _: None
) -> tuple[PullResult | DiptychError, KVMemory, SinkEngine]:
    """Pull in two segments with `case.transport` and gRPC; `spoil` changes the source's pool during the pull."""
    theirs = case.memory(case.theirs, 20, case.source_cuda if case.source_on_device else None)
    ours = case.memory(case.ours, 20, case.sink_cuda if case.sink_on_device else None)
    blocks = BLOCKS[case.theirs.block_size]
    store(looked_at(theirs), blocks, known_rows(case.theirs))
    table = tuple(range(19, 19 - case.ours.num_blocks_for(NUM_TOKENS), -1))
    engine, staging = SinkEngine(table=table), staging_of(ours.device)
    names = (case.transport, "grpc") if case.transport != "grpc" else ("grpc",)
    far = make_transports(names, [theirs.region], device=theirs.device) if case.source_on_device else None
    near_names = names if case.sink_on_device else ("grpc",)
    near = make_transports(near_names, [ours.region, *staging.regions], device=ours.device)
    async with AsyncExitStack() as stack:
        for transport in (*(far or {}).values(), *near.values()):
            stack.push_async_callback(transport.close)
        served = await stack.enter_async_context(serve(memory=theirs, transports=far))
        sink, _ = await stack.enter_async_context(
            receive(engine, memory=ours, transports=near, settings=case.settings, staging=staging)
        )
        served.source.offer("h", NUM_TOKENS)
        served.announce(blocks[:3], layout=case.theirs)
        pull = start(sink, served)
        await engine.until("reserve")
        spoil(looked_at(theirs))
        served.announce(blocks[3:], 3, layout=case.theirs)
        served.source.on_event(seal_event("h", NUM_TOKENS, [7]))
        try:
            result: PullResult | DiptychError = await pull  # type: ignore[assignment]
        except DiptychError as e:
            result = e
        await until_quiet(sink)
    assert staging.num_free == STAGING_BYTES
    assert not case.sink_cuda.opened, "what is mapped is unmapped at the end"
    case.source_cuda.free()
    case.sink_cuda.free()
    return result, looked_at(ours), engine
