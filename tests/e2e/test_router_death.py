"""A router that is killed under load: clients with idempotency keys go on at another one, from where they stood."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from diptych.cluster.front.retries.answer_key import KEY_HEADER, SEEN_HEADER, AnswerKey

from ..support.harness import TINY, WorkerHandle, assert_nothing_leaked, workers
from ..support.lone_routers import LoneRouter, lone_routers

NUM_TOKENS = 60
STRIKE_AT = 100  # events, over all clients
CHAT = {"messages": [{"role": "user", "content": "Tell me of the sea"}]}
COMPLETION = {"prompt": "Once upon a time there was a"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", COMPLETION),
    ("/v1/completions", COMPLETION | {"n": 2}),
    ("/v1/completions", COMPLETION | {"temperature": 0.0, "logprobs": 1}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 2, "stop": ["zzz"]}),
]
LOST = (httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError)
Events = list[tuple[int, dict[str, Any]]]

pytestmark = [pytest.mark.e2e]


@pytest.fixture(scope="module")
def crew() -> Iterator[list[WorkerHandle]]:
    with workers(TINY, ["prefill", "decode"], dtype="float32", threads=1, transports="grpc") as handles:
        yield handles


@pytest.fixture(scope="module")
def routers(crew: list[WorkerHandle]) -> Iterator[list[LoneRouter]]:
    with lone_routers(TINY, crew, 2) as started:
        yield started


def body_of(index: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    path, body = BODIES[index % len(BODIES)]
    return path, {"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "user": str(index)} | body | fields


async def read(client: httpx.AsyncClient, url: str, index: int, found: Events, on_event: Callable[[], None]) -> None:
    """Read an answer from after the last event in `found`."""
    path, body = body_of(index, stream=True)
    headers = {KEY_HEADER: f"client-{index}"} | ({SEEN_HEADER: str(found[-1][0])} if found else {})
    async with client.stream("POST", f"{url}{path}", json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        number = 0
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: "):
                found.append((number, {} if line == "data: [DONE]" else json.loads(line[6:])))
                on_event()


def texts(events: Events) -> dict[int, str]:
    """Text of each choice."""
    found: dict[int, str] = {}
    for _, event in events:
        for choice in event.get("choices", ()):
            part = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + part
    return found


async def undisturbed(client: httpx.AsyncClient, url: str, index: int) -> dict[int, str]:
    """Texts of the same call without a key, which no worker has recorded; the seed is the key's."""
    key = AnswerKey.of(f"client-{index}", "", b"")
    path, body = body_of(index, seed=key.seed(0), cache_salt="undisturbed")
    answer = (await client.post(f"{url}{path}", json=body)).raise_for_status().json()
    return {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]}


async def test_clients_of_a_killed_router_go_on_at_another(routers: list[LoneRouter], crew: list[WorkerHandle]) -> None:
    first, second = routers
    num_events, num_cut, num_clients = 0, 0, len(BODIES)

    def count() -> None:
        nonlocal num_events
        num_events += 1
        if num_events == STRIKE_AT:
            first.kill()

    async def ask(client: httpx.AsyncClient, index: int) -> Events:
        nonlocal num_cut
        found: Events = []
        try:
            await read(client, first.url, index, found, count)
        except LOST:
            num_cut += bool(found)
            await read(client, second.url, index, found, lambda: None)
        return found

    async with httpx.AsyncClient(timeout=120.0) as client:
        answers = await asyncio.gather(*(ask(client, index) for index in range(num_clients)))
        assert num_cut >= 2, "the router was killed while answers were on their way"
        for index, events in enumerate(answers):
            assert [number for number, _ in events] == list(range(1, len(events) + 1))
            assert len({event["id"] for _, event in events if event}) == 1, "one answer has one id"
            assert texts(events) == await undisturbed(client, second.url, index)
    assert_nothing_leaked(crew)


async def test_an_answer_that_has_come_whole_comes_again_elsewhere(
    routers: list[LoneRouter], crew: list[WorkerHandle]
) -> None:
    _, second = routers
    path, body = body_of(1)
    async with httpx.AsyncClient(timeout=120.0) as client:

        async def ask(**fields: Any) -> httpx.Response:
            return await client.post(f"{second.url}{path}", json=body | fields, headers={KEY_HEADER: '"whole"'})

        first = (await ask()).raise_for_status().json()
        before = sum(handle.settled_state().load.num_decode_tokens for handle in crew)
        again = (await ask()).raise_for_status().json()
        assert (again["id"], again["choices"]) == (first["id"], first["choices"])
        made = sum(handle.settled_state().load.num_decode_tokens for handle in crew) - before
        assert made < 10, "the tokens come from the workers' records"
        refused = await ask(max_tokens=NUM_TOKENS + 1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
