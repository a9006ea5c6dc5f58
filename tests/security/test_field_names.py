"""Names of fields come from attackers, and go into a header and a log."""

import logging

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.cluster.front.openai.fields import HEADER

from ..support.front import Echo, served
from ..support.logs import messages_of

HOSTILE = ["x\r\nset-cookie: a=b", "a, b", "\x00", "é" * 500, "\x1b[31mred", "%0d%0a", " ", "", "x" * 5000]


def test_names_of_fields_break_neither_header_nor_log(caplog: pytest.LogCaptureFixture) -> None:
    with served(Echo(laps=1)) as server, caplog.at_level(logging.WARNING, logger="diptych.fields"):
        for name in HOSTILE:
            response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", name: 1})
            assert response.status_code == 200 and "set-cookie" not in response.headers
            value = response.headers.get(HEADER, "")
            assert (
                len(value) <= 64 and value.isascii() and value.isprintable() and "," not in value and " " not in value
            )
    messages = messages_of(caplog, "diptych.fields")
    assert messages and all(message.isprintable() for message in messages)


def test_any_names_are_answered() -> None:
    with served(Echo(laps=1)) as server, httpx.Client(base_url=server.url, timeout=60) as http:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(names=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=80), max_size=40))
        def check(names: list[str]) -> None:
            message = {"role": "user", "content": "x"} | dict.fromkeys(names, 1)
            response = http.post("/v1/completions", json=dict.fromkeys(names, 1) | {"prompt": "x"})
            assert response.status_code in (200, 400) and len(response.headers.get(HEADER, "")) < 1100
            assert http.post("/v1/chat/completions", json={"messages": [message]}).status_code in (200, 400)

        check()
