"""A source that offers more than can be: nothing is made of its numbers before they are compared with our own."""

import tracemalloc
from typing import Any

import pytest

from diptych.proto import kv_pb2
from diptych.workers.errors import HandoffError
from diptych.workers.handoff_source import HandoffSource

from ..workers.handoff_pair import SMALL, SinkEngine, failure, receive, run, serve, start

NUM_BLOCKS = 8
POOL_TOKENS = NUM_BLOCKS * SMALL.block_size


@pytest.mark.parametrize("num_tokens", [POOL_TOKENS + 1, 1 << 24, (1 << 32) - 1])
def test_an_offer_of_more_tokens_than_the_pool_holds_is_refused_before_anything_is_made_of_it(num_tokens: int) -> None:
    class Liar(HandoffSource):
        def _opened(self, *args: Any) -> kv_pb2.Opened:
            opened = super()._opened(*args)
            opened.num_tokens, opened.num_blocks = num_tokens, -(-num_tokens // SMALL.block_size)
            return opened

    async def test() -> None:
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
            assert [call[0] for call in engine.calls] == ["fail"]

    run(test)
