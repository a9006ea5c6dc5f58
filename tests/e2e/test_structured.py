"""Structured answers through hand-offs, deaths of workers and migrations: the same tokens as undisturbed, all valid."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product

import jsonschema
import pytest
import tokenizers

from diptych.cluster.control.worker_control import WorkerControl
from diptych.cluster.routing.router import Router
from diptych.workers.common.request import FinishReason, Grammar, GrammarKind, Request, SamplingParams

from ..support.harness import TINY, WorkerHandle, assert_nothing_leaked
from .test_worker_death import Crew, routed

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 12},
        "size": {"type": "integer", "minimum": 10, "maximum": 9999},
        "kind": {"enum": ["circle", "square", "line"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
WORDS = r"([a-z]{3,8} ){30}[a-z]{2,4}\."
CHOICES = ["a much longer answer than any model of this size would give by itself " * 3, "yes", "no"]


def records(num: int) -> Grammar:
    return Grammar(
        GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": RECORD, "minItems": num, "maxItems": num})
    )


GRAMMARS = (
    records(4),
    Grammar(GrammarKind.REGEX, WORDS),
    Grammar(GrammarKind.CHOICE, json.dumps(CHOICES)),
    Grammar(GrammarKind.GRAMMAR, 'root ::= "<" item{40,60} ">"\nitem ::= [0-9] [a-f] "-"'),
)
LONG = (records(9), Grammar(GrammarKind.REGEX, r"([a-z]{3,8} ){90}[a-z]{2,4}\."))  # that outlive a drain
PROMPT_LENGTHS = (3, 60, 130, 300)  # 300: several chunks

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


def requests(salt: str, grammars: Sequence[Grammar] = GRAMMARS) -> list[Request]:
    """Each grammar after prompts of each length, greedy and seeded in turn."""
    found: list[Request] = []
    for i, (length, grammar) in enumerate(product(PROMPT_LENGTHS, grammars)):
        prompt = tuple(10 + (i * 37 + j * j) % 2000 for j in range(length))
        sampling = SamplingParams(temperature=i % 2 * 1.0, seed=i, max_tokens=1600, grammar=grammar)
        found.append(Request(f"{salt}-{i}", prompt, sampling, timeout_s=120.0, cache_salt=salt.encode()))
    return found


async def answer(router: Router, request: Request, on_tokens: Callable[[int], None] = lambda _num: None) -> list[int]:
    ids: list[int] = []
    finish = None
    async for delta in router.stream(request):
        ids += delta.token_ids
        finish = delta.finish_reason
        on_tokens(len(delta.token_ids))
    assert finish is FinishReason.STOP
    return ids


def check(request: Request, ids: list[int]) -> None:
    text = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json")).decode(ids[:-1])
    grammar = request.sampling.grammar
    assert grammar is not None
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(text), json.loads(grammar.text))
        case GrammarKind.REGEX:
            assert re.fullmatch(grammar.text, text)
        case GrammarKind.CHOICE:
            assert text in CHOICES
        case _:
            assert re.fullmatch("<([0-9][a-f]-){40,60}>", text)


async def under_load(
    router: Router, asked: Sequence[Request], fault: Callable[[], Awaitable[None]], strike_at: int
) -> list[list[int]]:
    """Answers to all requests, sent at once; `fault` begins when this many tokens have arrived."""
    num_out, striking = 0, asyncio.Event()

    def count(num: int) -> None:
        nonlocal num_out
        num_out += num
        if num_out >= strike_at:
            striking.set()

    async def strike() -> None:
        await striking.wait()
        await fault()

    found, _ = await asyncio.gather(asyncio.gather(*(answer(router, request, count) for request in asked)), strike())
    return found


def counted(router: Router, name: str) -> float:
    lines = router.metrics().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with ExitStack() as stack:
        yield Crew(TINY, "shared_memory", stack)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[list[int]]]:
    """The answers, one after the other, once a test has asked for them."""
    return {}


async def alone(crew: Crew, known: dict[str, list[list[int]]]) -> list[list[int]]:
    if not known:
        async with routed(crew.complete()) as router:
            known["alone"] = [await answer(router, request) for request in requests("alone")]
        for request, ids in zip(requests("alone"), known["alone"], strict=True):
            check(request, ids)
        assert sum(map(len, known["alone"])) > 16 * 40
    return known["alone"]


@pytest.mark.parametrize("case", ["together", "one", "two"])
async def test_answers_are_those_of_an_undisturbed_cluster(
    crew: Crew, undisturbed: dict[str, list[list[int]]], case: str
) -> None:
    expected = await alone(crew, undisturbed)
    handles = crew.complete()
    killed: list[WorkerHandle] = []

    async def busiest() -> WorkerHandle:
        """Worker that decodes most of the answers."""
        states = [await asyncio.to_thread(handle.state) for handle in handles if handle not in killed]
        left = [handle for handle in handles if handle not in killed]
        return left[max(range(len(left)), key=lambda i: states[i].load.num_running)]

    async def strike() -> None:
        for _ in range({"one": 1, "two": 2}.get(case, 0)):
            killed.append(await busiest())
            killed[-1].kill()

    num_tokens = sum(map(len, expected))
    async with routed(handles) as router:
        assert await under_load(router, requests(case), strike, num_tokens // 4) == expected
        assert not killed or counted(router, "diptych_request_resumes_total") > 0
    assert_nothing_leaked([handle for handle in handles if handle not in killed])


async def test_answers_of_a_worker_that_drains_move_and_stay_the_same(crew: Crew) -> None:
    handles = crew.complete()
    control = await WorkerControl.open(handles[-1].address, None)

    async def drain() -> None:
        await control.drain()
        while not await control.is_drained():
            await asyncio.sleep(0.02)

    async def nothing() -> None:
        pass

    async with routed(handles) as router:
        expected = await under_load(router, requests("stays", LONG), nothing, 0)
        for request, ids in zip(requests("stays", LONG), expected, strict=True):
            check(request, ids)
        assert await under_load(router, requests("moves", LONG), drain, sum(map(len, expected)) // 8) == expected
        assert counted(router, "diptych_request_migrations_total") > 0
        assert counted(router, "diptych_request_resumes_total") == 0
    await control.close()
    assert_nothing_leaked(handles)
