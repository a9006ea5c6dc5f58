"""Plan of an answer: from the dialect, the client's tools and the end of the prompt."""

from pathlib import Path

import pytest
from tokenizers import AddedToken

from diptych.cluster.dialects.dialect import Dialect, find_dialect
from diptych.cluster.dialects.thoughts import ThoughtState
from diptych.cluster.dialects.tools import ToolSpec, ToolUse
from diptych.cluster.front.answer_plan import check_tools, plan_answer, thought_state
from diptych.cluster.tokens.tokenizer import Tokenizer
from diptych.workers.common.errors import InvalidRequest
from diptych.workers.common.request import ANY_JSON_OBJECT, Grammar
from diptych.workers.grammar.compiler import GrammarCompiler

from ...support.front import END, byte_backend

TEMPLATE = "<think> <tool_call>"
TOOL_CALL = 260  # id of the token
DIALECT = find_dialect(TEMPLATE)
TIME = ToolUse((ToolSpec("time", {"type": "object"}),), "required")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = byte_backend()
    backend.add_special_tokens([AddedToken("<tool_call>", special=True)])
    return Tokenizer(backend, {"eos_token": "<|end|>"}, TEMPLATE)


def test_marks_that_are_special_tokens_are_named_by_id_and_shown(tokenizer: Tokenizer) -> None:
    plan = plan_answer(DIALECT, TIME, None, tokenizer, ThoughtState.FREE)
    assert plan is not None and plan.grammar is not None
    assert f"<[{TOOL_CALL}]>" in plan.grammar.text and '"<tool_call>"' not in plan.grammar.text
    detokenizer = tokenizer.detokenizer(shown=plan.dialect.marks)
    assert detokenizer.push(TOOL_CALL) == "<tool_call>"


@pytest.mark.parametrize(
    ("use", "grammar", "answer"),
    [
        (TIME, None, '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'),
        (TIME, None, '<think>Which?</think>\n\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'),
        (ToolUse(), ANY_JSON_OBJECT, "<think>Which?</think>\n\n{}"),
    ],
)
def test_marks_in_angle_brackets_that_are_added_tokens_can_be_written(
    tmp_path: Path, use: ToolUse, grammar: Grammar | None, answer: str
) -> None:
    """Such tokens of Qwen 3 are not special, and llguidance takes them as special."""
    backend = byte_backend()
    backend.add_tokens(
        [AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(backend, {"eos_token": "<|end|>"}, TEMPLATE)
    plan = plan_answer(DIALECT, use, grammar, tokenizer, ThoughtState.FREE)
    assert plan is not None and plan.grammar is not None
    failures: list[object] = []
    compiler = GrammarCompiler.of_folder(tmp_path, tokenizer.vocab_size, (END,))
    matcher = compiler.compile(plan.grammar).matcher(failures.append)
    for token in tokenizer.encode(answer):
        matcher.consume([token])
        assert matcher.check(), (tokenizer.token_name(token), failures)
    assert matcher.state is not None and matcher.state.is_accepting()


@pytest.mark.parametrize(
    ("prompt", "continues", "state"),
    [
        ("Hi <think>\n", None, ThoughtState.OPEN),
        ("Hi", None, ThoughtState.FREE),
        ("</think>", None, ThoughtState.DONE),
        ("a thought of many words", "<think>a thought of many words", ThoughtState.OPEN),
        ("words of an answer", "<think>a</think>words of an answer", ThoughtState.DONE),
        ("words of an answer", "words of an answer", ThoughtState.DONE),
        ("<think>\n", "", ThoughtState.OPEN),
        ("Hi", " ", ThoughtState.FREE),
    ],
)
def test_the_prompt_tells_the_state_of_the_thought(
    tokenizer: Tokenizer, prompt: str, continues: str | None, state: ThoughtState
) -> None:
    found = thought_state(DIALECT, tokenizer, tokenizer.encode("x" * 100 + prompt), continues)
    plan = plan_answer(DIALECT, ToolUse(), ANY_JSON_OBJECT, tokenizer, found)
    assert plan is not None and plan.thought is state
    assert (plan.grammar == ANY_JSON_OBJECT) == (state is ThoughtState.DONE)


def test_an_answer_of_a_model_without_marks_is_text(tokenizer: Tokenizer) -> None:
    assert plan_answer(Dialect(), ToolUse(), None, tokenizer, ThoughtState.FREE) is None
    assert plan_answer(find_dialect("<tool_call>"), ToolUse(), None, tokenizer, ThoughtState.FREE) is None
    check_tools(Dialect(), ToolUse())
    with pytest.raises(InvalidRequest, match=r"router\.tool_parser"):
        check_tools(Dialect(), TIME)


def test_a_message_of_channels_is_not_continued_under_a_grammar(tokenizer: Tokenizer) -> None:
    """The grammar would demand the beginning of a channel within the message."""
    harmony = find_dialect("<|channel|><|message|>")
    free = plan_answer(harmony, ToolUse(), None, tokenizer, ThoughtState.FREE, continues=True)
    assert free is not None and free.grammar is None
    with pytest.raises(InvalidRequest, match="cannot continue a message under a grammar") as caught:
        plan_answer(harmony, ToolUse(), ANY_JSON_OBJECT, tokenizer, ThoughtState.FREE, continues=True)
    assert caught.value.param == "messages"
