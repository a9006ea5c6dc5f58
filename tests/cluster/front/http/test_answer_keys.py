"""Answers that are asked for again, at another router, after the events that the client has."""

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from diptych.cluster.front.access.key_file import KeyFile
from diptych.cluster.front.access.key_ring import KeyRing
from diptych.cluster.front.http import calls
from diptych.cluster.front.http.edge import AccessPolicy
from diptych.cluster.front.retries.answer_key import AnswerKey, key_of
from diptych.proto import inference_pb2, inference_pb2_grpc
from diptych.workers.common.errors import IdempotencyKeyReused, Unavailable
from diptych.workers.common.request import RecordKey

from ....support.front import Echo, Served, served

TEMPLATE = "{# <tool_call> <think> #}{{ messages[-1].content }}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = f"<think>\nWhich cité?\n</think>\n\nLet me see.\n{CALL}"
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASKED = [{"role": "user", "content": SAID}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "héllo wörld", "max_tokens": 30, "stop": ["wörl"]}),
    "choices": ("/v1/completions", {"prompt": ["abc", "defghi"], "n": 2, "max_tokens": 9, "echo": True, "logprobs": 1}),
    "chat": ("/v1/chat/completions", {"messages": ASKED, "n": 2, "stream_options": {"include_usage": True}}),
    "tools": ("/v1/chat/completions", {"messages": ASKED, "tools": [{"type": "function", "function": TOOL}]}),
    "responses": ("/v1/responses", {"input": SAID, "tools": [{"type": "function", **TOOL}], "store": True}),
    "messages": (
        "/v1/messages",
        {"messages": ASKED, "max_tokens": 200, "tools": [{"name": "weather", "input_schema": TOOL["parameters"]}]},
    ),
}
Events = list[tuple[int, str]]


@pytest.fixture(scope="module")
def routers() -> Iterator[tuple[Served, Served]]:
    """Two routers that deliver the same tokens in other pieces."""
    with served(Echo(laps=1), template=TEMPLATE) as one, served(Echo(laps=1), template=TEMPLATE) as other:
        other.source.tokens_a_delta, other.source.prompt_parts = 5, 3
        yield one, other


def timeless(event: str) -> str:
    """Event without the times at which it was made."""
    value = json.loads(event)
    for part in (value, value.get("response", {})):
        for name in ("created", "created_at", "completed_at"):
            part.pop(name, None)
    return json.dumps(value)


def read(at: Served, call: str, key: str, seen: int | None = None, num: int | None = None) -> Events:
    """Events of a streamed answer; the client leaves after `num`."""
    path, body = CALLS[call]
    headers = {"idempotency-key": key} | ({} if seen is None else {"last-event-id": str(seen)})
    found: Events = []
    with httpx.stream("POST", f"{at.url}{path}", json=body | {"stream": True}, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        number = 0  # of an event without an id
        for line in answer.iter_lines():
            if not line:
                number = 0
            elif line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: "):
                found.append((number, line[6:] if line[6:] == "[DONE]" else timeless(line[6:])))
                if len(found) == num:
                    break
    return found


@pytest.mark.parametrize("call", CALLS)
def test_a_stream_goes_on_at_another_router(routers: tuple[Served, Served], call: str) -> None:
    one, other = routers
    whole = read(one, call, f"whole {call}".replace(" ", "-"))
    assert [number for number, _ in whole] == list(range(1, len(whole) + 1))
    assert read(other, call, f"whole-{call}") == whole
    random_ = random.Random(call)
    for cut in (0, 1, len(whole) - 1, len(whole), *random_.sample(range(2, len(whole) - 1), 4)):
        had = read(one, call, f"whole-{call}", num=cut) if cut else []
        assert [*had, *read(other, call, f"whole-{call}", seen=cut)] == whole


@pytest.mark.parametrize("call", CALLS)
def test_an_answer_that_is_not_streamed_comes_again(routers: tuple[Served, Served], call: str) -> None:
    path, body = CALLS[call]
    body = {name: value for name, value in body.items() if name != "stream_options"}

    def ask(at: Served, key: str) -> dict[str, Any]:
        answer = httpx.post(f"{at.url}{path}", json=body, headers={"idempotency-key": f'"{key} of it"'})
        return json.loads(timeless(answer.raise_for_status().text))

    one, other = routers
    first = ask(one, call)
    assert ask(other, call) == first == ask(one, call)
    assert ask(other, f"{call} 2")["id"] != first["id"]
    seeds = [[r.sampling.seed for r in at.source.requests[-1:]] for at in routers]
    assert seeds[0] != seeds[1], "another key, another seed"


def test_the_seed_is_the_same_everywhere_and_the_clients_own_counts(routers: tuple[Served, Served]) -> None:
    path, body = CALLS["choices"]
    seen: list[list[int]] = []
    for at in routers:
        for seed in ({}, {"seed": 7}):
            httpx.post(f"{at.url}{path}", json=body | seed, headers={"idempotency-key": "seeds"}).raise_for_status()
            seen.append([r.sampling.seed for r in at.source.requests[-4:]])
            assert all(r.record is not None for r in at.source.requests[-4:])
    assert seen[0] == seen[2] and seen[1] == seen[3] and len(set(seen[0])) == 4
    assert seen[1][0] == 7
    httpx.post(f"{routers[0].url}{path}", json=body).raise_for_status()
    assert routers[0].source.requests[-1].record is None, "without a key nothing is recorded"


def test_keys_of_one_tenant_say_nothing_of_anothers(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"ann: {'a' * 20}\nbob: {'b' * 20}\n")
    file.chmod(0o600)
    found: list[tuple[bytes, int]] = []
    for api_key in ("a" * 20, "b" * 20, "a" * 20):
        with served(Echo(laps=1), access=AccessPolicy(KeyRing(None, KeyFile(file)))) as at:
            headers = {"idempotency-key": "k", "authorization": f"Bearer {api_key}"}
            httpx.post(f"{at.url}/v1/completions", json={"prompt": "a"}, headers=headers).raise_for_status()
            [request] = at.source.requests
            assert request.record is not None
            found.append((request.record.name, request.sampling.seed))
    assert found[0] == found[2] and found[0][0] != found[1][0] and found[0][1] != found[1][1]


@pytest.mark.parametrize("call", CALLS)
def test_an_error_in_a_stream_has_no_id(routers: tuple[Served, Served], call: str) -> None:
    one, other = routers
    one.source.fail = lambda made: Unavailable("lost: try again") if made == 5 else None
    try:
        cut = read(one, call, "broken")
    finally:
        one.source.fail = lambda _: None
    assert "error" in cut[-1][1] and cut[-1][0] == 0
    had = [(number, event) for number, event in cut if number]
    assert had and not any(number for number, _ in cut[len(had) :])
    whole = read(one, call, "broken")
    assert [*had, *read(other, call, "broken", seen=len(had))] == whole


def test_events_of_a_response_that_is_cancelled_have_no_id(routers: tuple[Served, Served]) -> None:
    one, other = routers
    one.source.gate_after = 9
    one.loop.call_soon_threadsafe(one.source.gate.clear)
    path, body = CALLS["responses"]
    found, response_id = list[str](), ""
    try:
        headers = {"idempotency-key": "cancelled"}
        with httpx.stream("POST", f"{one.url}{path}", json=body | {"stream": True}, headers=headers) as answer:
            for event in answer.iter_text():
                found.append(event)
                if not response_id and "output_item.added" in "".join(found):
                    response_id = "resp_" + "".join(found).partition('"id":"resp_')[2].partition('"')[0]
                    httpx.post(f"{one.url}{path}/{response_id}/cancel").raise_for_status()
    finally:
        one.open_gate()
        one.source.gate_after = 0
    events = "".join(found).split("\n\n")[:-1]
    num = sum(event.startswith("id: ") for event in events)
    assert "response.incomplete" in events[-1] and not any(event.startswith("id: ") for event in events[num:])
    assert 0 < num < len(events)
    whole = read(one, "responses", "cancelled")
    assert read(other, "responses", "cancelled", seen=num) == whole[num:]


def id_of(events: Events) -> str:
    return json.loads(events[0][1])["response"]["id"]


def test_a_turn_that_follows_another_end_is_another_call(routers: tuple[Served, Served]) -> None:
    """A router where the first turn broke has another conversation than the one where it went on."""
    one, other = routers

    def records() -> list[RecordKey | None]:
        body = {"input": "More", "previous_response_id": previous, "max_output_tokens": 4}
        for at in routers:
            headers = {"idempotency-key": "turn-2"}
            httpx.post(f"{at.url}/v1/responses", json=body, headers=headers).raise_for_status()
        return [at.source.requests[-1].record for at in routers]

    previous = id_of(read(one, "responses", "turn-1"))
    other.source.fail = lambda made: Unavailable("lost: try again") if made >= 5 else None
    try:
        assert id_of(read(other, "responses", "turn-1")) == previous
    finally:
        other.source.fail = lambda _: None
    whole, broken = records()
    assert whole and broken and whole.name == broken.name and whole.call != broken.call
    read(other, "responses", "turn-1")
    assert records() == [whole, whole]


def test_a_kept_response_outlives_calls_with_its_key_that_do_not_end(routers: tuple[Served, Served]) -> None:
    one, _ = routers
    response_id = id_of(read(one, "responses", "kept"))
    path, body = CALLS["responses"]

    def kept() -> dict[str, Any]:
        return httpx.get(f"{one.url}{path}/{response_id}").raise_for_status().json()

    whole = kept()
    assert whole["status"] == "completed"
    one.source.fail = lambda _: IdempotencyKeyReused("used for another call: use a new key")
    try:
        answer = httpx.post(f"{one.url}{path}", json=body | {"input": "other"}, headers={"idempotency-key": "kept"})
        assert answer.status_code == 422
    finally:
        one.source.fail = lambda _: None
    assert kept() == whole
    one.source.gate_after = 9
    one.loop.call_soon_threadsafe(one.source.gate.clear)
    try:
        read(one, "responses", "kept", num=4)
        assert one.source.all_closed.wait(60)
        while (found := kept())["status"] == "in_progress":
            pass
    finally:
        one.open_gate()
        one.source.gate_after = 0
    assert found == whole, "its client left a retry, but the first call has ended"


def test_a_large_body_is_hashed_off_the_loop(routers: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def key_on(*call: Any) -> AnswerKey | None:
        try:
            asyncio.get_running_loop()
            threads.append(False)
        except RuntimeError:
            threads.append(True)
        return key_of(*call)

    monkeypatch.setattr(calls, "key_of", key_on)
    for padding in (0, calls.MAX_INLINE_BYTES):
        body = json.dumps({"prompt": "ab"}) + " " * padding
        headers = {"idempotency-key": "large", "content-type": "application/json"}
        httpx.post(f"{routers[0].url}/v1/completions", content=body, headers=headers).raise_for_status()
    assert threads == [False, True]


def test_what_is_no_key_is_refused(routers: tuple[Served, Served]) -> None:
    path, body = CALLS["completion"]
    for headers in ({"last-event-id": "3"}, {"idempotency-key": "a b"}, {"idempotency-key": "k", "last-event-id": "x"}):
        answer = httpx.post(f"{routers[0].url}{path}", json=body, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_messages_of_grpc(routers: tuple[Served, Served]) -> None:
    def ask(at: Served, num: int | None = None, **fields: Any) -> list[inference_pb2.GenerateResponse]:
        request = inference_pb2.GenerateRequest(text="héllo", n=2, **fields)
        request.sampling.prompt_logprobs = 1
        with grpc.insecure_channel(at.address) as channel:
            stream = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=30)
            found = list(itertools.islice(stream, num))
            stream.cancel()
        for message in found:
            message.ClearField("request_id")
            message.ClearField("timings")
        return found

    one, other = routers
    assert {m.event_id for m in ask(one)} == {0}
    whole = ask(one, idempotency_key="k")
    assert [m.event_id for m in whole] == list(range(1, len(whole) + 1)) and whole[0].prompt_logprobs
    for cut in (1, 2, 5, len(whole) - 1):
        had = ask(one, cut, idempotency_key="k")
        assert [*had, *ask(other, idempotency_key="k", last_event_id=cut)] == whole
    with pytest.raises(grpc.RpcError, match="needs the idempotency_key"):
        ask(one, last_event_id=3)
