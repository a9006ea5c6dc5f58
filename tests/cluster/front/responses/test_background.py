"""Responses that run without their clients, read with the official one. The model repeats its prompt."""

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from diptych.cluster.front.access.key_file import KeyFile
from diptych.cluster.front.access.key_ring import KeyRing
from diptych.cluster.front.http.edge import AccessPolicy
from diptych.cluster.front.responses.store import StoreLimits
from diptych.workers.common.errors import Overloaded

from ....support.front import Echo, Served, served

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NUM_BEFORE_GATE = 3  # tokens


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo(laps=1), template=TEMPLATE) as it:
        yield it


def close_gate(server: Served) -> None:
    server.source.gate_after = NUM_BEFORE_GATE
    server.loop.call_soon_threadsafe(server.source.gate.clear)


def wait(client: openai.OpenAI, response_id: str, status: set[str]) -> Response:
    """The response, as soon as it has one of these states."""
    deadline = time.monotonic() + 30
    while (found := client.responses.retrieve(response_id)).status not in status:
        assert time.monotonic() < deadline, found.status
        time.sleep(0.01)
    return found


def begin(client: openai.OpenAI, **body: Any) -> Response:
    made = client.responses.create(model="echo", input="hello", background=True, **body)
    assert (made.status, made.background, made.output, made.usage) == ("queued", True, [], None)
    return made


def test_a_response_in_the_background_is_answered_at_once_and_read_later(client: openai.OpenAI, server: Served) -> None:
    close_gate(server)
    made = begin(client)
    assert wait(client, made.id, {"in_progress"}).output_text == ""
    with pytest.raises(openai.BadRequestError, match="in progress"):
        client.responses.create(model="echo", input="on", previous_response_id=made.id)
    server.open_gate()
    ended = wait(client, made.id, {"completed"})
    assert (ended.output_text, ended.id, ended.created_at) == ("hello", made.id, made.created_at)
    assert ended.usage is not None and ended.usage.output_tokens == 6
    assert client.responses.create(model="echo", input="-", previous_response_id=made.id).output_text == "hellohello-"


def test_it_runs_whether_its_client_reads_its_events_or_not(client: openai.OpenAI, server: Served) -> None:
    close_gate(server)
    seen: list[Any] = []
    with client.responses.create(model="echo", input="hello", background=True, stream=True) as events:
        for event in events:
            seen.append(event)
            if event.type == "response.output_text.delta" and event.delta == "e":
                break
    response_id = seen[0].response.id
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.response.status for event in seen[:3]] == ["queued", "queued", "in_progress"]
    rest = client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    server.open_gate()
    seen += rest
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed" and seen[-1].response.output_text == "hello"
    assert list(client.responses.retrieve(response_id, stream=True)) == seen, "also after its end"
    assert list(client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)) == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_it_is_cancelled(client: openai.OpenAI, server: Served, stream: bool) -> None:
    close_gate(server)
    if stream:
        with client.responses.create(model="echo", input="hello", background=True, stream=True) as events:
            first: Any = next(iter(events))
        made = first.response
    else:
        made = begin(client)
    wait(client, made.id, {"in_progress"})
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert server.source.all_closed.wait(60)
    assert client.responses.cancel(made.id) == cancelled == client.responses.retrieve(made.id)
    if stream:
        *_, last = client.responses.retrieve(made.id, stream=True)
        assert last.type == "response.incomplete" and last.response == cancelled


def test_it_is_deleted(client: openai.OpenAI, server: Served) -> None:
    close_gate(server)
    made = begin(client)
    client.responses.delete(made.id)
    assert server.source.all_closed.wait(60)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_an_error_is_the_responses(client: openai.OpenAI, server: Served) -> None:
    """The call has been answered already."""
    server.source.fail = lambda made: Overloaded("later") if made == 0 else None
    failed = wait(client, begin(client).id, {"failed"})
    assert failed.error is not None and (failed.error.code, failed.error.message) == ("rate_limit_exceeded", "later")


def test_a_fault_of_the_router_is_an_error_and_no_cancellation(
    client: openai.OpenAI, server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(made: int) -> None:
        if made == 2:
            raise KeyError("bug")

    server.source.fail = fail
    failed = wait(client, begin(client).id, {"failed", "cancelled"})
    assert failed.error is not None and failed.error.code == "server_error" and "own fault" in failed.error.message
    assert "KeyError" in caplog.text


def test_what_cannot_be_streamed_again_is_refused(client: openai.OpenAI, server: Served) -> None:
    made = begin(client)
    ended = wait(client, made.id, {"completed"})
    with pytest.raises(openai.BadRequestError, match="background=true and stream=true"):
        client.responses.retrieve(made.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="needs stream=true"):
        client.responses.retrieve(made.id, extra_query={"starting_after": 1})
    with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
        client.responses.cancel(ended.id)
    events: list[Any] = list(client.responses.create(model="echo", input="a", background=True, stream=True))
    for bad in (len(events), "x", -1):
        with pytest.raises(openai.BadRequestError, match="starting_after is the number of an event"):
            client.responses.retrieve(events[0].response.id, stream=True, extra_query={"starting_after": bad})


def test_events_that_fill_the_memory_end_their_response() -> None:
    with (
        served(Echo(laps=1), template=TEMPLATE, kept=StoreLimits(max_bytes=6000)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        *_, last = client.responses.create(model="echo", input="x" * 300, background=True, stream=True)
        assert last.type == "response.failed" and last.response.error is not None
        assert "fill the memory" in last.response.error.message
        assert server.source.all_closed.wait(60)
        assert wait(client, begin(client).id, {"completed"}).output_text == "hello", "there is room again"


def test_the_same_call_with_its_key_is_the_same_response(client: openai.OpenAI, server: Served) -> None:
    close_gate(server)
    key = {"Idempotency-Key": "one"}
    made = begin(client, extra_headers=key)
    wait(client, made.id, {"in_progress"})
    again = client.responses.create(model="echo", input="hello", background=True, extra_headers=key)
    assert (again.id, again.status) == (made.id, "in_progress")
    with pytest.raises(openai.UnprocessableEntityError, match="choose another"):
        client.responses.create(model="echo", input="other", background=True, extra_headers=key)
    server.open_gate()
    ended = wait(client, made.id, {"completed"})
    assert client.responses.create(model="echo", input="hello", background=True, extra_headers=key) == ended
    assert len(server.source.requests) == 1


def test_it_counts_as_a_call_of_its_key_until_its_end(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"ann: {{key: {'a' * 20}, limits: {{concurrent_requests: 1}}}}\n")
    file.chmod(0o600)
    with (
        served(Echo(laps=1), template=TEMPLATE, access=AccessPolicy(KeyRing(None, KeyFile(file)))) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="a" * 20, max_retries=0) as client,
    ):
        close_gate(server)
        made = begin(client)
        with pytest.raises(openai.RateLimitError):
            client.responses.create(model="echo", input="more")
        server.open_gate()
        wait(client, made.id, {"completed"})
        assert client.responses.create(model="echo", input="more").output_text == "more"


def test_it_needs_store(server: Served) -> None:
    body = {"input": "a", "background": True, "store": False}
    answer = httpx.post(f"{server.url}/v1/responses", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "background"
