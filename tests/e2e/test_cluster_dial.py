"""A cluster that begins with a prefill and a decode worker moves their budgets under load, and answers as before."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest

from ..support.cluster_harness import END_S, MODEL, Served, diptych, serving

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.alone]

# First tokens are what matters: two workers that compute prompts are better than one.
LEVEL = "service_level: {ttft_s: 0.25, tpot_s: 5}\n"
PROMPT_TOKENS = 1200
MOST_CLIENTS = 8


def prompts() -> Iterator[list[int]]:
    """Prompts of which no two share a block."""
    return ([2 + number, *(3 + (number * 7 + i) % 900 for i in range(1, PROMPT_TOKENS))] for number in count())


def answer(served: Served, prompt: list[int]) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    response = httpx.post(f"{served.http_address}/v1/completions", json=body, timeout=END_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def roles(served: Served) -> list[tuple[str, str]]:
    return sorted((worker["pool"], worker["role"]) for worker in served.status()["workers"])


def test_a_split_that_does_not_suit_the_load_ends_by_itself(tmp_path: Path) -> None:
    (config := tmp_path / "cluster.yaml").write_text(LEVEL)
    source = prompts()
    first = next(source)
    with serving(tmp_path / "home", "--config", str(config)) as served, ThreadPoolExecutor(MOST_CLIENTS) as clients:
        before = answer(served, first)
        running: list[Future[str]] = []
        began = time.monotonic()
        while not (status := served.status())["decisions"]:
            took_s = time.monotonic() - began
            assert took_s < END_S, "nothing was decided"
            ended = [one.result() for one in running if one.done()]  # raises where one has failed
            assert all(ended)
            running = [one for one in running if not one.done()]
            num_clients = min(1 + int(took_s / 5), MOST_CLIENTS)  # one more every five seconds
            running += [clients.submit(answer, served, next(source)) for _ in range(num_clients - len(running))]
        assert status["decisions"][-1]["action"] == "1 -> 0 of 2 workers only prefill", json.dumps(status["decisions"])
        assert all(one.result() for one in running), "no request fails while budgets move"
        while roles(served) != [("decode", "mixed"), ("prefill", "mixed")]:
            assert time.monotonic() - began < 2 * END_S, roles(served)
        assert answer(served, first) == before
        assert "1 -> 0 of 2 workers only prefill" in diptych(served.home, "status", "--why").stdout
        served.assert_nothing_is_held()
