"""A response is kept while and after it runs, and by nothing that never ran."""

import asyncio
from contextlib import aclosing

import pytest

from diptych.cluster.common.quota import Quota
from diptych.cluster.front.front_door import GenerationSpec
from diptych.cluster.front.responses.answer import AnswerStyle, ResponseAnswer
from diptych.cluster.front.responses.run import ResponseRun
from diptych.cluster.front.responses.store import ResponseStore, Stored, StoreLimits
from diptych.workers.common.errors import Overloaded
from diptych.workers.common.request import SamplingParams

from ....support.front import Echo, front_door


async def started(store: ResponseStore, source: Echo, *, is_streamed: bool = True) -> ResponseRun:
    door = front_door(source)
    generation = await door.start(GenerationSpec(("hello",), SamplingParams()), "resp_1")
    answer = ResponseAnswer(generation, door.tokenizer, AnswerStyle("echo", '"x":1', is_streamed, None, False))
    run = ResponseRun(generation, answer, store, Quota(1000, "full"))
    run.keep(Stored("resp_1", "", [], store.turn_after(None, ""), answer.json, run.cancel))
    return run


def test_nothing_is_kept_of_a_response_whose_client_left_before_it_ran() -> None:
    async def main() -> None:
        store, source = ResponseStore(), Echo(laps=1)
        run = await started(store, source)
        await run.events().aclose()
        assert len(store) == 0 and store.num_bytes == 0 and not source.requests

    asyncio.run(main())


def test_a_response_whose_client_leaves_is_cancelled() -> None:
    async def main() -> None:
        store, source = ResponseStore(), Echo(laps=1)
        run = await started(store, source)
        async with aclosing(run.events()) as events:
            assert "response.created" in await anext(events)
            assert store.find("", "resp_1").is_running
        entry = store.find("", "resp_1")
        assert not entry.is_running and '"status":"cancelled"' in entry.response()
        assert source.closed == ["resp_1-0"]

    asyncio.run(main())


def test_a_response_that_fails_before_its_first_token_is_not_kept() -> None:
    async def main() -> None:
        store, source = ResponseStore(), Echo(laps=1)
        source.fail = lambda _: Overloaded("later")
        run = await started(store, source)
        with pytest.raises(Overloaded, match="later"):
            await anext(run.events())
        assert len(store) == 0 and store.num_bytes == 0

    asyncio.run(main())


def test_a_response_that_cannot_be_kept_does_not_run() -> None:
    async def main() -> None:
        store, source = ResponseStore(StoreLimits(max_entries=0)), Echo(laps=1)
        run = await started(store, source)
        with pytest.raises(Overloaded, match="store=false"):
            await anext(run.events())
        assert len(store) == 0 and store.num_bytes == 0 and not source.requests

    asyncio.run(main())


def test_a_whole_response_is_kept_as_it_was_sent() -> None:
    async def main() -> None:
        store, source = ResponseStore(), Echo(laps=1)
        run = await started(store, source, is_streamed=False)
        whole = await run.whole()
        assert store.find("", "resp_1").response().encode() == whole

    asyncio.run(main())
