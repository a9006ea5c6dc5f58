"""A response is kept while and after it runs, and by nothing that never ran."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from openai.types.responses import ResponseErrorEvent
from starlette.types import Message

from diptych.cluster.common.quota import Quota
from diptych.cluster.front.front_door import GenerationSpec
from diptych.cluster.front.generation import Generation
from diptych.cluster.front.http.connection import CLIENT, CUT, ClientPresence
from diptych.cluster.front.http.stream import EventStream
from diptych.cluster.front.responses.answer import AnswerStyle, ResponseAnswer
from diptych.cluster.front.responses.run import ResponseRun
from diptych.cluster.front.responses.store import ResponseStore, Stored, StoreLimits
from diptych.workers.common.errors import InvalidRequest, Overloaded
from diptych.workers.common.request import SamplingParams

from ....support.front import Echo, front_door


async def answering(source: Echo, *, is_streamed: bool = True) -> tuple[Generation, ResponseAnswer]:
    door = front_door(source)
    generation = await door.start(GenerationSpec(("hello",), SamplingParams()), "resp_1")
    return generation, ResponseAnswer(
        generation, door.tokenizer, AnswerStyle("echo", '"x":1', is_streamed, None, False)
    )


async def started(store: ResponseStore, source: Echo, *, is_streamed: bool = True) -> ResponseRun:
    generation, answer = await answering(source, is_streamed=is_streamed)
    run = ResponseRun(generation, answer, store, Quota(1000, "full"))
    run.keep(Stored("resp_1", "", [], store.turn_after(None, ""), answer.json, run.cancel))
    return run


def test_an_error_that_is_not_the_responses_is_an_event_as_openais_clients_read_it() -> None:
    """Of a stream that breaks off: it goes on in the numbers of the response's own events."""

    async def main() -> None:
        generation, answer = await answering(Echo(laps=1))

        async def events() -> AsyncGenerator[str, None]:
            async with aclosing(generation.batches()) as batches:
                answer.push(await anext(batches))
                yield answer.take_events()
                raise InvalidRequest("it is too much: send less", param="input")

        sent: list[str] = []

        async def send(message: Message) -> None:
            sent.append(message.get("body", b"").decode())

        async def receive() -> Message:
            return await asyncio.Future[Message]()

        scope = {"type": "http", "state": {CUT: lambda: None, CLIENT: ClientPresence()}}
        await EventStream(events(), answer.error_event, 60.0)(scope, receive, send)
        written = "".join(sent).strip().split("\n\n")
        name, data = written[-1].splitlines()
        assert name == "event: error"
        event = ResponseErrorEvent.model_validate_json(data.removeprefix("data: "), strict=True)
        assert (event.type, event.code, event.param) == ("error", "invalid_request_error", "input")
        assert event.message == "it is too much: send less"
        assert event.sequence_number == len(written) - 1 > 2
        assert sent[-1] == ""  # the stream ends after it

    asyncio.run(main())


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
