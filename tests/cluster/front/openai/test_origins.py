"""`token_origins`: each chunk of a stream names the workers of its tokens, and when they came."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from diptych.cluster.front.openai.format import CompletionFormat, Include
from diptych.cluster.front.text_completion import TextDelta
from diptych.workers.common.request import FinishReason

from ....support.front import Echo, served
from ....support.watched import WatchedRouter, watched

BODIES = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/completions", {"prompt": "Hello"}),
)


def chunks(text: str) -> list[dict[str, object]]:
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [choice for event in events if event != "[DONE]" for choice in json.loads(event)["choices"]]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_each_chunk_names_the_workers_of_its_tokens(path: str, body: dict[str, object]) -> None:
    with watched() as router:
        found = chunks(answer(router, path, body | {"token_origins": True}))
    prefill, decode = (worker.incarnation for worker in router.workers)
    told = [(each["worker"], each["num_tokens"]) for choice in found for each in choice.get("origins", ())]  # type: ignore[attr-defined]
    assert told[0] == (prefill, 1) and {worker for worker, _ in told[1:]} == {decode}
    assert sum(num for _, num in told) == 5
    times = [choice["elapsed_s"] for choice in found if "origins" in choice]
    assert times == sorted(times) and times[0] > 0  # type: ignore[type-var]


def answer(router: WatchedRouter, path: str, body: dict[str, object]) -> str:
    while httpx.get(f"{router.url}/health").status_code != 200:
        pass
    prefill, decode = router.workers
    with ThreadPoolExecutor(1) as pool:
        given = {"json": body | {"stream": True, "max_tokens": 5}, "timeout": 60}
        answered = pool.submit(httpx.post, router.url + path, **given)  # type: ignore[arg-type]
        source, sink = router.call(prefill.submitted()).handle, router.call(decode.submitted()).handle
        router.do(lambda: prefill.first_token(source))
        router.do(lambda: decode.pulled_tokens(sink, 2))
        router.do(lambda: decode.tokens(sink, [301, 302], start=3, finish=FinishReason.LENGTH))
        return answered.result().text


def test_it_is_not_there_unless_asked_for_and_needs_a_stream() -> None:
    with served(Echo(laps=1)) as server:
        for path, body in BODIES:
            plain = httpx.post(server.url + path, json=body | {"stream": True})
            assert "origins" not in plain.text and "elapsed_s" not in plain.text
            refused = httpx.post(server.url + path, json=body | {"token_origins": True})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "token_origins"


@pytest.mark.parametrize(
    ("runs", "first", "expected"),
    [
        ([(0, "a")], 0, [("a", 3)]),
        ([(0, "a"), (1, "b")], 0, [("a", 1), ("b", 2)]),
        ([(0, "a"), (1, "b"), (2, "c")], 0, [("a", 1), ("b", 1), ("c", 1)]),
        ([(0, "a"), (5, "b")], 4, [("a", 1), ("b", 2)]),
        ([(0, "a"), (9, "b")], 2, [("a", 3)]),  # the last has not been told of yet
        ([], 0, []),
    ],
)
def test_runs_are_cut_to_the_chunk(runs: list[tuple[int, str]], first: int, expected: list[tuple[str, int]]) -> None:
    class Completion:
        origins = runs

    class Answer:
        completions = (Completion(),)

    form = object.__new__(CompletionFormat)
    form._include, form._generation = Include(origins=True), Answer()  # type: ignore[assignment]
    found = form._origins(TextDelta(0, "", (7, 8, 9), elapsed_s=1.25), first)
    assert [(each["worker"], each["num_tokens"]) for each in found["origins"]] == expected
    assert found["elapsed_s"] == 1.25
