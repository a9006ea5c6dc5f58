"""A pool of several machines is read and written as an undivided one."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.workers.common.errors import LayoutMismatch, TransportError
from diptych.workers.handoff.segment_receiver import PullSettings
from diptych.workers.kv.bridge import Bridge
from diptych.workers.kv.checksums import pool_checksums
from diptych.workers.kv.device_kv import Staged
from diptych.workers.kv.layout import DOT, LAYER_MAJOR, ROWS, KVLayout, Runs
from diptych.workers.kv.layout_check import check_bridge
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.segment import Read, Segment

from ...support.gpu.device_pairs import BLOCKS, DRAFTED, LAYOUT, NUM_TOKENS, due_rows, known_rows, load, store
from ...support.gpu.fake_cuda import make_device_memory, seen_by_host
from ...support.handoff_pair import (
    SMALL,
    SinkEngine,
    make_memory,
    memory_bytes,
    receive,
    seal_event,
    serve,
    start,
    until_quiet,
)
from ...support.spread_pools import SpreadPool, spread
from ..kv.test_bridge import cases, fill, sent

CUTS = {2: [(1, 1)], 4: [(2, 2), (1, 3), (1, 1, 1, 1)]}
FOUR = replace(LAYOUT, tensor_parallel=4)


def staged_parts(bridge: Bridge, source: KVMemory, read: Read) -> Iterator[tuple[Segment, bytes]]:
    for part in bridge.parts(read.segment, whole_blocks=False):
        yield part, sent(source, part, bridge.wire)


def convert(pool: SpreadPool, bridge: Bridge, part: Segment, data: bytes, read: Read, start: int = 64) -> None:
    pool.kv.staging.view[start : start + len(data)] = data
    pool.kv.convert(bridge, Staged(part, start, len(data), False), read.table, read.first_token)


def is_bridged(ours: KVLayout, theirs: KVLayout) -> bool:
    try:
        check_bridge(ours, theirs)
        check_bridge(theirs, ours)
    except LayoutMismatch:
        return False
    return True


@st.composite
def spread_cases(draw: st.DrawFn) -> tuple[KVLayout, KVLayout, tuple[int, ...], str, int, int]:
    """(source, ours, cut, wire dtype asked for, tokens held, seed)."""
    theirs, ours, _, num_held, seed = draw(cases())
    ours = replace(ours, tensor_parallel=draw(st.sampled_from([2, 4])))
    if not is_bridged(ours, theirs):
        ours = replace(ours, draft_tensor_parallel=1 if ours.draft_id else 0)
    if not is_bridged(ours, theirs):
        ours = replace(ours, tensor_parallel=2)
    asked = draw(st.sampled_from(["", "", "bfloat16", "int8"]))
    return theirs, ours, draw(st.sampled_from(CUTS[ours.tensor_parallel])), asked, num_held, seed


@settings(max_examples=60, deadline=None)
@given(spread_cases())
def test_what_is_converted_and_read_is_that_of_an_undivided_pool(
    case: tuple[KVLayout, KVLayout, tuple[int, ...], str, int, int],
) -> None:
    theirs, layout, cut, asked, first_token, seed = case
    rng, num_blocks = random.Random(seed), layout.num_blocks_for(first_token + 70) + 1
    source, whole = make_memory(theirs, theirs.num_blocks_for(first_token + 70) + 1), make_memory(layout, num_blocks)
    fill(source, seed)
    fill(whole, seed + 1)
    table = tuple(rng.sample(range(num_blocks), num_blocks - 1))
    ids = tuple(rng.sample(range(source.num_blocks), source.num_blocks - 1))
    with spread(layout, num_blocks, cut) as pool:
        pool.content = bytes(whole.region.view or b"")
        bridge, own = (Bridge(of, theirs, source.num_blocks, asked) for of in (pool.kv.memory, whole))
        layers = [(0, theirs.num_target_layers), (theirs.num_target_layers, bridge.num_layers)]
        for first, end in layers[: 1 + bridge.brings_draft]:
            segment = Segment(0, ids, (1,) * len(ids), first, end - first)
            read = Read(0, segment, table, first_token)
            for part, data in staged_parts(own, source, read):
                own.convert(memoryview(data), part, table, first_token)
                convert(pool, bridge, part, data, read)
        assert pool.content == bytes(whole.region.view or b"")
        for blocks in (range(num_blocks), table):
            runs = whole.runs(blocks, 0, layout.num_layers)
            assert pool.kv.read(runs) == memory_bytes(whole, runs)
        some = (table[:1], 0, layout.num_target_layers, layout.dtype)
        assert pool_checksums(pool.kv.memory, *some) == pool_checksums(whole, *some)


@pytest.mark.parametrize("name", ["two", "replicated", "draft", "int8", "layers"])
def test_parts_on_devices_are_converted_there(name: str) -> None:
    theirs, layout, cut = {
        "two": (replace(LAYOUT, dtype="bfloat16", packing=DOT), replace(LAYOUT, tensor_parallel=2), (1, 1)),
        "replicated": (
            replace(LAYOUT, block_size=4),
            replace(LAYOUT, tensor_parallel=8, axis_order=LAYER_MAJOR),
            (4, 4),
        ),
        "draft": (
            DRAFTED,
            replace(DRAFTED, tensor_parallel=2, draft_tensor_parallel=1, block_size=4),
            (1, 1),
        ),
        "int8": (replace(LAYOUT, dtype="int8", tensor_parallel=2), replace(FOUR, dtype="int8", block_size=4), (2, 2)),
        "layers": (replace(FOUR, axis_order=LAYER_MAJOR), replace(FOUR, dtype="bfloat16"), (1, 3)),
    }[name]
    source, num_blocks = make_memory(theirs, 20), layout.num_blocks_for(NUM_TOKENS) + 2
    store(source, BLOCKS[theirs.block_size], known_rows(theirs))
    whole, table = make_device_memory(layout, num_blocks), tuple(range(num_blocks - 1, 1, -1))
    assert whole.device is not None
    with spread(layout, num_blocks, cut, on_device=True) as pool:
        bridge, own = (Bridge(of, theirs, source.num_blocks) for of in (pool.kv.memory, whole))
        ids = BLOCKS[theirs.block_size]
        read = Read(0, Segment(0, ids, (1,) * len(ids), 0, theirs.num_layers), table, 5)
        for part, data in staged_parts(own, source, read):
            whole.device.staging.view[: len(data)] = data
            whole.device.convert(own, Staged(part, 0, len(data), False), table, 5)
            convert(pool, bridge, part, data, read)
        seen = seen_by_host(whole)
        assert pool.content == bytes(seen.region.view or b"") and any(pool.content)
        runs = whole.runs(range(num_blocks), 0, layout.num_layers)
        assert pool.kv.read(runs) == memory_bytes(seen, runs)


def test_runs_may_lie_anywhere_and_machines_are_asked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.workers.handoff.machine_link.READ_BYTES", 1000)
    four, rng = replace(SMALL, tensor_parallel=4, num_kv_heads=4), np.random.default_rng(1)
    with spread(four, 3, (1, 1, 2), over_tcp=True) as pool:
        pool.content = content = rng.bytes(3 * four.block_bytes)
        offsets = rng.integers(0, len(content) - 3000, 40)
        runs = Runs(offsets, rng.integers(1, 3000, 40))
        whole = make_memory(four, 3, content=content)
        assert pool.kv.read(runs) == memory_bytes(whole, runs)
        everything = Runs(np.array([0]), np.array([len(content)]))
        assert pool.kv.read(everything) == content
        assert pool.kv.read(Runs(offsets[:0], offsets[:0])) == b""


def test_a_machine_is_sent_what_its_ranks_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that the first rank has alone go nowhere else."""
    theirs = replace(DRAFTED, tensor_parallel=2, draft_tensor_parallel=1)
    source = make_memory(theirs, 4)
    fill(source, 1)
    with spread(theirs, 4, (1, 1)) as pool:
        asked: list[tuple[int, int]] = []
        monkeypatch.setattr(
            pool.links[0], "convert", lambda part, data: asked.append((part.part.num_layers, sum(map(len, data))))
        )
        bridge = Bridge(pool.kv.memory, theirs, 4)
        for first, num in ((0, 2), (2, 1)):
            read = Read(0, Segment(0, (1, 2), (1, 1), first, num), (0, 1), 0)
            for part, data in staged_parts(bridge, source, read):
                convert(pool, bridge, part, data, read)
        half = 2 * 2 * theirs.layer_groups(0, 2)[0].uniform.layer_bytes
        assert asked == [(2, half)]


def test_blocks_are_copied_on_the_other_machines() -> None:
    with spread(FOUR, 4, (1, 1, 2)) as pool:
        pool.kv.copy_blocks([(1, 2), (1, 3)])
        pool.kv.copy_blocks([])
        assert pool.copied == [[(1, 2), (1, 3)]] * 2


def test_a_machine_that_is_gone_fails_what_needs_it_once_all_have_ended() -> None:
    theirs = replace(LAYOUT, block_size=4)
    source = make_memory(theirs, 4)
    fill(source, 1)
    with spread(FOUR, 4, (2, 2)) as pool:
        pool.links[0].close()
        bridge = Bridge(pool.kv.memory, theirs, 4)
        read = Read(0, Segment(0, (1, 2), (1, 1), 0, 3), (2,), 0)
        [(part, data)] = staged_parts(bridge, source, read)
        with pytest.raises(TransportError, match="rank 2, on another machine, is lost"):
            convert(pool, bridge, part, data, read)
        assert any(pool.content), "ours is written, and nothing writes any more"
        half = 4 * 2 * FOUR.rank_block_bytes
        assert len(pool.kv.read(Runs(np.array([0]), np.array([half])))) == half
        with pytest.raises(TransportError, match="rank 2, on another machine, is lost"):
            pool.kv.read(Runs(np.array([half - 8]), np.array([16])))


@pytest.mark.parametrize("wire_dtype", ["", "bfloat16"])
@pytest.mark.parametrize("on_device", [False, True])
async def test_sequences_are_handed_over_between_workers_on_several_machines(on_device: bool, wire_dtype: str) -> None:
    ours = replace(LAYOUT, tensor_parallel=2, block_size=4, packing=ROWS, axis_order=LAYER_MAJOR)
    num_blocks = ours.num_blocks_for(NUM_TOKENS) + 1
    filled, table = make_memory(FOUR, 20), tuple(range(num_blocks - 1, 0, -1))
    store(filled, BLOCKS[16], known_rows(FOUR))
    with (
        spread(FOUR, 20, (2, 2), on_device=on_device) as far,
        spread(ours, num_blocks, (1, 1), on_device=on_device) as near,
    ):
        far.content = bytes(filled.region.view or b"")
        engine, settings = SinkEngine(table=table), PullSettings(wire_dtype, verify=True)
        async with (
            serve(memory=far.kv.memory) as served,
            receive(engine, memory=near.kv.memory, settings=settings, staging=near.kv.staging) as (sink, _),
        ):
            served.source.offer("h", NUM_TOKENS)
            served.announce(BLOCKS[16][:3], layout=FOUR)
            pull = start(sink, served)
            await engine.until("reserve")
            served.announce(BLOCKS[16][3:], 3, layout=FOUR)
            served.source.on_event(seal_event("h", NUM_TOKENS, [7]))
            await pull
            await until_quiet(sink)
        assert [call[0] for call in engine.calls] == ["reserve", "begin", "commit"]  # type: ignore[index]
        assert np.array_equal(load(near.whole, table), due_rows(FOUR, ours))
        assert near.kv.staging.num_free == near.kv.staging.region.num_bytes
