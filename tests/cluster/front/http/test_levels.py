"""Model names, service tiers and levels in headers, over HTTP."""

import json
from collections.abc import Generator
from typing import Any

import httpx
import openai
import pytest

from diptych.cluster.common.config import NamedLevel, ServiceLevel
from diptych.cluster.front.levels import ServiceLevels
from diptych.workers.common.errors import Overloaded
from diptych.workers.common.request import RequestLevel

from ....support.front import Echo, Served, served

LEVELS = ServiceLevels(
    ServiceLevel(tiers={"priority": NamedLevel(ttft_s=0.2)}), {"chat": NamedLevel(tpot_s=0.05), "echo": NamedLevel()}
)


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo(laps=1), levels=LEVELS) as it:
        yield it


def post(server: Served, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    body = {"prompt": "hi"} | body
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers or {}, timeout=60)


def level(server: Served) -> RequestLevel:
    return server.source.requests[-1].level


def test_every_name_of_the_model_is_listed_and_served(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["echo", "chat"]
        assert client.models.retrieve("chat").to_dict()["root"] == "echo"
        answer = client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "hi"}])
        assert answer.model == "chat" and answer.service_tier is None
        assert level(server) == RequestLevel(tpot_s=0.05, model="chat")
        with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here: use 'echo' or 'chat'"):
            client.models.retrieve("gpt-9")


def test_an_answer_names_the_tier_that_served_it(server: Served) -> None:
    for tier, served_by in (("auto", "default"), ("default", "default"), ("priority", "priority")):
        assert post(server, service_tier=tier).json()["service_tier"] == served_by
    assert level(server) == RequestLevel(0.2, model="echo", tier="priority")
    assert "service_tier" not in post(server, service_tier=None).json()
    events = post(server, service_tier="priority", stream=True).text.split("\n\n")[:-2]
    assert {json.loads(event.removeprefix("data: "))["service_tier"] for event in events} == {"priority"}


def test_a_call_asks_for_a_level_in_headers(server: Served) -> None:
    headers = {"X-Diptych-TTFT-ms": "250", "x-diptych-tpot-ms": "12.5", "x-diptych-admission": "refuse"}
    assert post(server, headers, service_tier="priority").status_code == 200
    assert level(server) == RequestLevel(0.25, 0.0125, True, "echo", "priority")
    long = "x" * 70_000  # read in another process
    assert post(server, headers, metadata={"long": long}, service_tier="priority").status_code == 200
    assert level(server) == RequestLevel(0.25, 0.0125, True, "echo", "priority")
    for name, bound, expected in (("ttft", "1", 0.001), ("ttft", "3600000", 3600), ("tpot", "0.1", 0.0001)):
        assert post(server, {f"x-diptych-{name}-ms": bound}).status_code == 200
        assert getattr(level(server), f"{name}_s") == expected


@pytest.mark.parametrize("value", ["", "0", "-5", "1e3", "nan", "inf", "1_000", "9" * 5000, "250ms", "0.00001"])
@pytest.mark.parametrize("name", ["x-diptych-ttft-ms", "x-diptych-tpot-ms"])
def test_a_header_that_is_no_time_is_refused_by_name(server: Served, name: str, value: str) -> None:
    error = post(server, {name: value})
    assert error.status_code == 400
    found = error.json()["error"]
    assert found["param"] == name and f"the header {name} must be a number of milliseconds in [" in found["message"]
    assert not server.source.requests


@pytest.mark.parametrize("headers", [{"x-diptych-admission": "never"}, {"x-diptych-admission": ""}])
def test_another_admission_is_refused_by_name(server: Served, headers: dict[str, str]) -> None:
    found = post(server, headers).json()["error"]
    assert found["param"] == "x-diptych-admission" and "must be wait or refuse" in found["message"]


def test_a_header_that_is_sent_twice_is_refused(server: Served) -> None:
    twice = [("x-diptych-ttft-ms", "5"), ("x-diptych-ttft-ms", "6"), ("content-type", "application/json")]
    answer = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "hi"}', headers=twice)
    assert answer.status_code == 400 and "was sent 2 times" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_says_when_to_come_again_and_whether_that_helps(server: Served, stream: bool) -> None:
    for helps in (True, False):
        server.source.fail = lambda _, helps=helps: Overloaded("late", retry_after_s=7.2, retry_helps=helps)
        answer = post(server, stream=stream)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "8")
        assert answer.headers.get("x-should-retry") == (None if helps else "false")
