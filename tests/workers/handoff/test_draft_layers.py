"""Pulls between pools of which one or both hold the KV of a model that drafts, over every transport."""

from dataclasses import replace

import numpy as np
import pytest

from diptych.proto import kv_pb2
from diptych.workers.common.errors import ChecksumMismatch, DiptychError, HandoffError
from diptych.workers.handoff.pull import PullResult
from diptych.workers.handoff.segment_receiver import PullSettings
from diptych.workers.handoff.source import HandoffSource
from diptych.workers.kv.layout import DOT, LAYER_MAJOR, KVLayout
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.staging import Staging

from ...support.handoff_pair import SinkEngine, make_memory, piece, receive, seal_event, segment_event, serve, start
from .test_layouts import BLOCKS, NUM_TOKENS, THEIRS, ends, fill, tokens

NUM_DRAFT = 66  # of the tokens, those with the draft's KV
NUM_INEXACT = 2
SHAPES = ((4, 8),) * 3 + ((2, 24),) * 2
DRAFTED = replace(THEIRS, num_layers=5, layer_shapes=SHAPES, num_draft_layers=2, draft_id="d")
OTHER = replace(DRAFTED, num_layers=4, layer_shapes=((4, 8),) * 3 + ((1, 16),), num_draft_layers=1, draft_id="e")
TARGET_BYTES, DRAFT_BYTES = (len(BLOCKS) * 16 * 2 * 4 * of for of in (3 * 4 * 8, 2 * 2 * 24))
WIDTH = 2 * 3 * 4 * 8  # numbers of a token in the target's layers
# of the source, of the sink
PAIRS = {
    "equal": (DRAFTED, DRAFTED),
    "smaller blocks, four ranks": (DRAFTED, replace(DRAFTED, block_size=4, tensor_parallel=4)),
    "layer-major, one rank": (DRAFTED, replace(DRAFTED, axis_order=LAYER_MAJOR, tensor_parallel=1)),
    "larger blocks, bfloat16": (DRAFTED, replace(DRAFTED, block_size=64, dtype="bfloat16")),
    "another draft": (DRAFTED, OTHER),
    "another draft, layer-major": (DRAFTED, replace(OTHER, axis_order=LAYER_MAJOR)),
    "another draft, smaller blocks, one rank": (DRAFTED, replace(OTHER, block_size=4, tensor_parallel=1)),
    "none at the sink": (DRAFTED, THEIRS),
    "none at the sink, smaller blocks": (DRAFTED, replace(THEIRS, block_size=4)),
    "none at the source": (THEIRS, DRAFTED),
    "none at the source, larger blocks, four ranks": (THEIRS, replace(DRAFTED, block_size=64, tensor_parallel=4)),
}


async def hand_over(
    layout: KVLayout,
    ours: KVMemory,
    *,
    kind: str = "grpc",
    settings: PullSettings | None = None,
    num_draft: int = NUM_DRAFT,
    source: type[HandoffSource] = HandoffSource,
) -> tuple[PullResult | DiptychError, KVMemory, SinkEngine]:
    """In two steps, of which each announces the target's layers, and then the draft's."""
    theirs, staging = make_memory(layout, 8, in_file=True), Staging(1 << 20)
    fill(theirs)
    engine = SinkEngine(table=tuple(range(ours.layout.num_blocks_for(NUM_TOKENS) - 1, -1, -1)))
    far, near = ends(kind, ours, staging, theirs)
    async with (
        serve(memory=theirs, transports=far, kind=source) as served,
        receive(engine, memory=ours, transports=near, settings=settings or PullSettings(), staging=staging) as (
            sink,
            _,
        ),
    ):
        served.source.offer("h", NUM_TOKENS)
        served.announce(BLOCKS[:3], layout=layout)
        pull = start(sink, served)
        await engine.until("reserve")
        served.announce(BLOCKS[3:], 3, layout=layout)
        served.source.on_event(seal_event("h", NUM_TOKENS, [7], num_draft, NUM_INEXACT))
        try:
            result: PullResult | DiptychError = await pull  # type: ignore[assignment]
        except DiptychError as e:
            result = e
    for transport in {*far.values(), *near.values()}:
        await transport.close()
    return result, theirs, engine


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kind", ["grpc", "nixl", "shared_memory", "loopback"])
async def test_the_drafts_kv_comes_where_both_sides_have_the_draft(kind: str, pair: str, verify: bool) -> None:
    there, here = PAIRS[pair]
    ours, brings = make_memory(here, 18), there.draft_id == here.draft_id
    num_draft = NUM_DRAFT if there.num_draft_layers else 0
    result, theirs, engine = await hand_over(
        there, ours, kind=kind, settings=PullSettings(verify=verify), num_draft=num_draft
    )
    assert isinstance(result, PullResult) and result.transport == kind, result
    assert result.num_bytes == TARGET_BYTES + (DRAFT_BYTES if brings else 0)
    assert engine.seal is not None and engine.seal.num_computed == NUM_TOKENS
    assert engine.seal.num_draft_computed == (NUM_DRAFT if brings else 0)
    assert engine.seal.num_inexact == NUM_INEXACT
    found, due = tokens(ours, engine.table), tokens(theirs, BLOCKS)
    assert np.array_equal(found[:, :WIDTH], due[:, :WIDTH])
    if brings:
        assert np.array_equal(found, due)
    else:
        assert not found[:, WIDTH:].any(), "nothing is written into the layers of another draft"


@pytest.mark.parametrize("pair", ["equal", "smaller blocks, four ranks", "another draft"])
async def test_a_narrower_wire_carries_it_too(pair: str) -> None:
    there, here = PAIRS[pair]
    ours = make_memory(here, 18)
    result, theirs, engine = await hand_over(there, ours, settings=PullSettings("int8", verify=True))
    assert isinstance(result, PullResult)
    due, found = tokens(theirs, BLOCKS), tokens(ours, engine.table)
    width = due.shape[1] if pair != "another draft" else WIDTH
    for columns in (slice(0, WIDTH), slice(WIDTH, width)):
        exact = due[:, columns]
        assert np.linalg.norm(found[:, columns] - exact) <= 0.01 * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", [DRAFTED.axis_order, LAYER_MAJOR])
@pytest.mark.parametrize("draft_id", ["d", "e"])
@pytest.mark.parametrize("kind", ["grpc", "shared_memory"])
async def test_packed_pools_exchange_it_directly(kind: str, draft_id: str, order: str, dtype: str) -> None:
    shapes = ((4, 16),) * 3 + ((2, 48),) * 2
    layout = replace(DRAFTED, head_dim=16, layer_shapes=shapes, packing=DOT, axis_order=order, dtype=dtype)
    ours, settings = make_memory(replace(layout, draft_id=draft_id), 18), PullSettings(verify=True)
    result, theirs, engine = await hand_over(layout, ours, kind=kind, settings=settings)
    assert isinstance(result, PullResult)
    for block, own in zip(BLOCKS, engine.table, strict=True):
        assert piece(ours, own, 0, 3) == piece(theirs, block, 0, 3)
        draft = piece(theirs, block, 3, 2)
        assert any(draft) and piece(ours, own, 3, 2) == (draft if draft_id == "d" else bytes(len(draft)))


class Forgetful(HandoffSource):
    """Names the content of the draft's layers, then lets it change."""

    def _checksums(self, segment: kv_pb2.Segment, wire: str) -> bytes:
        named = super()._checksums(segment, wire)
        if segment.first_layer == 3:
            assert self._memory.region.view is not None
            place = int(self._memory.runs([segment.block_ids[0]], 4, 1).offsets[-1])
            self._memory.region.view[place] ^= 1
        return named


@pytest.mark.parametrize("pair", ["equal", "smaller blocks, four ranks", "another draft", "none at the sink"])
async def test_the_drafts_layers_have_checksums_of_their_own(pair: str) -> None:
    there, here = PAIRS[pair]
    ours, settings = make_memory(here, 18), PullSettings(verify=True)
    result, _, engine = await hand_over(there, ours, settings=settings, source=Forgetful)
    if here.draft_id == "d":
        assert isinstance(result, ChecksumMismatch) and "layers 3..4) arrived" in result.message
        assert engine.seal is None
    else:
        assert isinstance(result, PullResult), "nobody reads what has changed"


@pytest.mark.parametrize("pair", ["equal", "another draft", "none at the sink", "none at the source"])
@pytest.mark.parametrize("num_draft", [NUM_TOKENS + 1, (1 << 32) - 1])
async def test_a_forged_count_is_refused_by_name(pair: str, num_draft: int) -> None:
    there, here = PAIRS[pair]
    result, _, engine = await hand_over(there, make_memory(here, 18), num_draft=num_draft)
    assert type(result) is HandoffError
    assert f"broke the protocol: {num_draft} tokens sealed with a draft's KV, of 70 with KV" in result.message
    assert engine.seal is None and any(call[0] == "fail" for call in engine.calls)  # type: ignore[index]


async def test_a_count_from_a_source_without_a_draft_is_none() -> None:
    result, _, engine = await hand_over(THEIRS, make_memory(DRAFTED, 18), num_draft=NUM_DRAFT)
    assert isinstance(result, PullResult)
    assert engine.seal is not None and engine.seal.num_draft_computed == 0


@pytest.mark.parametrize("pair", ["equal", "none at the sink"])
async def test_a_segment_of_both_models_layers_is_refused(pair: str) -> None:
    there, here = PAIRS[pair]
    engine = SinkEngine(table=tuple(range(5)))
    async with serve(there) as served, receive(engine, memory=make_memory(here, 18)) as (sink, _):
        served.source.offer("h", NUM_TOKENS)
        served.source.on_event(segment_event("h", 0, BLOCKS, [1] * 5, 2, 2))
        with pytest.raises(HandoffError, match="layers on both sides of layer 3"):
            await start(sink, served)
