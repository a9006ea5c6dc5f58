"""Peers that name more than can be: nothing is made of their numbers before they are compared with our own."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from diptych.proto import kv_pb2, kv_pb2_grpc, worker_pb2
from diptych.workers.common.channel import open_channel
from diptych.workers.common.errors import HandoffError, PromptTooLong
from diptych.workers.common.wire import request_from_submit
from diptych.workers.handoff import source as handoff_source
from diptych.workers.handoff.source import HandoffSource

from ..support.handoff_pair import SMALL, SinkEngine, failure, receive, serve, start, until_quiet

NUM_BLOCKS = 8
NUM_NAMES = 1 << 20  # of blocks or tokens, in one message
POOL_TOKENS = NUM_BLOCKS * SMALL.block_size


@pytest.mark.parametrize("num_tokens", [POOL_TOKENS + 1, 1 << 24, (1 << 32) - 1])
async def test_an_offer_of_more_tokens_than_the_pool_holds_is_refused_before_anything_is_made_of_it(
    num_tokens: int,
) -> None:
    class Liar(HandoffSource):
        def _opened(self, *args: Any) -> kv_pb2.Opened:
            opened = super()._opened(*args)
            opened.num_tokens, opened.num_blocks = num_tokens, -(-num_tokens // SMALL.block_size)
            return opened

    engine = SinkEngine()
    async with serve(kind=Liar) as served, receive(engine, num_blocks=NUM_BLOCKS) as (sink, _):
        served.hand_off()
        tracemalloc.start()
        try:
            error = await failure(start(sink, served))
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()
        assert isinstance(error, HandoffError) and "whole pool" in error.message
        assert [call[0] for call in engine.calls] == ["fail"]  # type: ignore[index]


def _too_many_blocks(announcement: kv_pb2.Announcement) -> None:
    announcement.segment.block_ids.extend(range(NUM_NAMES))


def _too_many_generations(announcement: kv_pb2.Announcement) -> None:
    announcement.segment.generations.extend(range(NUM_NAMES))


def _too_many_outputs(announcement: kv_pb2.Announcement) -> None:
    announcement.sealed.output_token_ids.extend(range(NUM_NAMES))


@pytest.mark.parametrize(
    ("event", "lie", "reason"),
    [
        ("segment", _too_many_blocks, "blocks, but at most 3"),
        ("segment", _too_many_generations, "blocks, but at most 3"),
        ("sealed", _too_many_outputs, "11 tokens offered"),
    ],
)
async def test_an_announcement_of_more_than_was_offered_is_refused_before_it_is_copied(
    event: str, lie: Callable[[kv_pb2.Announcement], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = handoff_source._announcement

    def lied(what: Any) -> kv_pb2.Announcement:
        announcement = truth(what)
        if announcement.WhichOneof("event") == event:
            lie(announcement)
        return announcement

    monkeypatch.setattr(handoff_source, "_announcement", lied)
    engine = SinkEngine()
    async with serve() as served, receive(engine) as (sink, _):
        served.hand_off()
        error = await failure(start(sink, served))
        assert isinstance(error, HandoffError) and reason in error.message
        await until_quiet(sink)


async def test_a_sink_that_pulls_more_blocks_than_there_are_is_refused_before_their_names_are_copied() -> None:
    async with serve(num_blocks=NUM_BLOCKS) as served, open_channel(served.address) as channel:
        segment = kv_pb2.Segment(block_ids=range(NUM_NAMES), num_layers=1)
        call = kv_pb2_grpc.KVHandoffStub(channel).Pull(kv_pb2.PullRequest(handoff_id="h", segment=segment))
        with pytest.raises(grpc.aio.AioRpcError, match="1,048,576 blocks, but at most 8"):
            await call.read()


@pytest.mark.parametrize("column", ["prompt_token_ids", "output_token_ids"])
def test_a_router_that_submits_more_tokens_than_a_context_holds_is_refused_before_they_are_copied(column: str) -> None:
    submit = worker_pb2.Submit(prompt_token_ids=[1])
    getattr(submit, column).extend(range(NUM_NAMES))
    with pytest.raises(PromptTooLong):
        request_from_submit(submit, 4096)
