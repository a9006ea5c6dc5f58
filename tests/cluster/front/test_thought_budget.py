"""Budgets of thoughts from a client's field to the request, by the tokens of the model's marks."""

from typing import Any

import pytest

from diptych.cluster.dialects.dialect import Dialect, find_dialect
from diptych.cluster.dialects.thoughts import THINK, ThoughtState
from diptych.cluster.front.answer_plan import AskedBudget, thought_budget, thought_state
from diptych.cluster.front.front_door import FrontDoor, GenerationSpec
from diptych.cluster.tokens.prompt_encoding import ChatPrompt
from diptych.cluster.tokens.tokenizer import Tokenizer
from diptych.workers.common.errors import InvalidRequest
from diptych.workers.common.request import SamplingParams, ThoughtBudget

from ...support.front import Echo, byte_backend

ASKED = AskedBudget(5, "thinking_token_budget")
THINKING = Dialect(thoughts=THINK)


def tokenizer(*, marked: bool = True) -> Tokenizer:
    """Tokenizer in which <think> and </think> are the tokens 260 and 261, if it is `marked`; as Qwen's, not special."""
    backend = byte_backend()
    if marked:
        backend.add_tokens([THINK.begin, THINK.end])
    return Tokenizer(backend, {"eos_token": "<|end|>"}, "{{ messages[-1].content }}")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hm?", ThoughtBudget(5, 260, 261)),
        ("Hm?<think>\n", ThoughtBudget(5, 260, 261, is_open=True)),
        ("Hm?<think>\n\n</think>\n\n", None),
    ],
)
def test_the_budget_begins_where_the_prompt_leaves_the_thought(prompt: str, expected: ThoughtBudget | None) -> None:
    its = tokenizer()
    state = thought_state(THINKING, its, its.encode(prompt), None)
    assert thought_budget(ASKED, THINKING, its, state) == expected


@pytest.mark.parametrize(
    ("dialect", "marked", "why"),
    [
        (Dialect(), True, "it has none that this server knows"),
        (find_dialect("<|channel|><|message|>"), True, "its thoughts are channels"),
        (THINKING, False, "<think> and </think> are not one token each"),
    ],
)
def test_models_whose_thoughts_cannot_be_bounded(dialect: Dialect, marked: bool, why: str) -> None:
    its = tokenizer(marked=marked)
    with pytest.raises(InvalidRequest, match=why) as caught:
        thought_budget(ASKED, dialect, its, ThoughtState.FREE)
    assert caught.value.param == "thinking_token_budget"
    assert (
        thought_budget(AskedBudget(5, "thinking.budget_tokens", is_hint=True), dialect, its, ThoughtState.FREE) is None
    )


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 0, got -2"):
        thought_budget(AskedBudget(-2, "thinking_token_budget"), THINKING, tokenizer(), ThoughtState.FREE)


@pytest.mark.parametrize("fields", [{"thought": ASKED}, {}])
async def test_the_request_of_a_worker_has_the_budget(fields: dict[str, Any]) -> None:
    source = Echo()
    source.vocab_size = 262
    door = FrontDoor(source, tokenizer(), dialect=THINKING)
    spec = GenerationSpec((ChatPrompt([{"role": "user", "content": "Hm?<think>"}]),), SamplingParams(), **fields)
    generation = await door.start(spec, "r")
    async for _ in generation.batches():
        break
    [request] = source.requests
    expected = ThoughtBudget(5, 260, 261, is_open=True) if fields else None
    assert request.sampling.thought == expected
    await door.close()
