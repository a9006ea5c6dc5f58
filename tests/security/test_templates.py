"""A chat template is an untrusted program with untrusted input: only its process ends if it costs too much."""

import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from diptych.cluster.front.limits import RequestLimits
from diptych.cluster.tokens.chat_template import SPECIAL_TOKENS
from diptych.cluster.tokens.task_process import ProcessLimits

from ..support.front import CONTEXT, TEMPLATE, Echo, Served, served

LIMITS = RequestLimits(process=ProcessLimits(cpu_s=0.5, wall_factor=40, max_memory_bytes=128 << 20))
MIB = 1 << 20


def chat(server: Served, content: str = "hi", **options: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "chat_template_kwargs": options, "max_tokens": 2}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def children() -> list[int]:
    """Processes that read prompts for this one."""
    module = "diptych.cluster.front.prompts.prompt_process"
    return [process.pid for process in psutil.Process().children() if module in process.cmdline()]


RESERVED = [
    *("messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKENS),
    *("range", "namespace", "raise_exception", "strftime_now"),
]


@pytest.mark.parametrize("name", RESERVED)
def test_options_may_not_replace_what_the_server_sets(name: str) -> None:
    with served(Echo(laps=1)) as server:
        response = chat(server, **{name: "x"})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "chat_template_kwargs")
        assert name in error["message"]
        assert server.source.requests == []


SWITCHED = "{% if hostile %}HOSTILE{% endif %}" + TEMPLATE
LOOP = "{% for i in range(99999) %}"
NESTED = LOOP * 3 + "{% endfor %}" * 3
DOUBLING = "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"


@pytest.mark.parametrize(
    "hostile",
    [
        NESTED,
        DOUBLING,
        "{{ 'x' * 99999999999 }}",
        "{{ 'x'.ljust(99999999999) }}",
        "{{ '%99999999999d' % 1 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ (range(99999) | list) * 99999 }}",
        "{% set text = messages[0].content * 2000000 %}",  # 198 MB, none of which appears in the answer
        "{% for i in range(99999) %}{{ messages[0].content * 99 }}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_much_is_refused_and_others_are_served(hostile: str) -> None:
    """Time, memory, text, and depth: each ends by a 400, and the next chat is answered."""
    with served(Echo(laps=1), limits=LIMITS, template=SWITCHED.replace("HOSTILE", hostile)) as server:
        assert chat(server).status_code == 200
        assert chat(server, "x" * 99, hostile=True).status_code == 400
        assert chat(server).status_code == 200
        assert len(server.source.requests) == 2
    assert children() == []


def test_a_template_is_compiled_away_from_the_router() -> None:
    """jinja computes constants when it compiles: 2 GB of text here."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with served(Echo(laps=1), limits=LIMITS, template="{{ 'x' * 1999999999 }}") as server:
        assert chat(server).status_code == 400
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def test_a_large_option_is_not_multiplied_into_a_larger_text() -> None:
    """1 MB in, 1 GB out: rendering stops where the text cannot fit the context."""
    template = "{% for i in range(1000) %}{{ filler }}{% endfor %}" + TEMPLATE
    with served(Echo(laps=1), limits=LIMITS, template=template) as server:
        response = chat(server, filler="x" * MIB)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        # It stopped with the first piece.
        assert f"at least {MIB} characters" in error["message"]
        assert f"context length is {CONTEXT} tokens" in error["message"]


def test_the_event_loop_runs_on_while_a_template_does_not_end() -> None:
    template = SWITCHED.replace("HOSTILE", NESTED)
    limits = RequestLimits(process=ProcessLimits(cpu_s=3600, wall_factor=1))
    with served(Echo(laps=1), limits=limits, template=template) as server:
        assert chat(server).status_code == 200
        [pid] = children()
        with httpx.Client(timeout=0.5) as impatient, pytest.raises(httpx.ReadTimeout):
            body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"hostile": True}}
            impatient.post(f"{server.url}/v1/chat/completions", json=body)
        # It renders still, and everything that is no chat is answered.
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200
        assert children() == [pid]
        os.kill(pid, signal.SIGKILL)
        assert chat(server).status_code == 200
    assert children() == []


def test_a_template_ends_by_its_processor_time_however_long_it_might_wait() -> None:
    limits = RequestLimits(process=ProcessLimits(cpu_s=0.5, wall_factor=100_000))
    with served(Echo(laps=1), limits=limits, template=SWITCHED.replace("HOSTILE", NESTED)) as server:
        assert chat(server, hostile=True).status_code == 400
        assert chat(server).status_code == 200


def test_a_process_that_was_ended_between_two_chats_is_started_again() -> None:
    with served(Echo(laps=1)) as server:
        assert chat(server).status_code == 200
        [pid] = children()
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        try:
            assert select.select([pidfd], [], [], 30)[0]
        finally:
            os.close(pidfd)
        assert chat(server).status_code == 200


def test_waiting_for_a_template_is_part_of_a_requests_time() -> None:
    """Time of this request and of those before it: a request ends at its deadline, and a worker gets the rest of it."""
    template = SWITCHED.replace("HOSTILE", NESTED)
    limits = RequestLimits(process=ProcessLimits(cpu_s=3600, wall_factor=1, max_wait_s=3600))
    with served(Echo(laps=1), limits=limits, template=template) as server:
        for hostile in (True, False):
            options = {"chat_template_kwargs": {"hostile": hostile}, "timeout_s": 0.2}
            body = {"messages": [{"role": "user", "content": "x"}]} | options
            response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            assert response.status_code == 504
            assert "the prompt was not read before" in response.json()["error"]["message"]
        [pid] = children()
        os.kill(pid, signal.SIGKILL)
        assert chat(server).status_code == 200
        text = {
            "prompt": "x" * (CONTEXT // 2),
            "user": "x" * 70_000,
            "max_tokens": 1,
        }  # read in a separate process, because it is large
        assert httpx.post(f"{server.url}/v1/completions", json=text, timeout=60).status_code == 200
        assert [0 < request.timeout_s < limits.max_timeout_s for request in server.source.requests] == [True, True]


ROUTER = """
import asyncio
from diptych.cluster.tokens.prompt_encoder import PromptEncoder
from diptych.cluster.tokens.task_process import ProcessLimits
from tests.support.front import byte_tokenizer

async def main():
    encoder = PromptEncoder(byte_tokenizer(), ProcessLimits())
    await encoder.start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_process_ends_with_its_router_and_has_little_of_it() -> None:
    root = Path(__file__).parents[2]
    router = subprocess.Popen([sys.executable, "-c", ROUTER], cwd=root, stdout=subprocess.PIPE)
    assert router.stdout is not None
    with router.stdout:
        assert router.stdout.readline() == b"ready\n"
        [child] = [process.pid for process in psutil.Process(router.pid).children()]
        pidfd = os.pidfd_open(child)
        mapped = Path(f"/proc/{child}/maps").read_text()
        assert "libtorch" not in mapped and "_raylet" not in mapped
        router.kill()
        router.wait()
    try:
        assert select.select([pidfd], [], [], 30)[0], "it outlived its router"
    finally:
        os.close(pidfd)
