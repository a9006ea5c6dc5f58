"""Output of a response: the same items and the right events, however its text is cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.cluster.dialects.dialect import find_dialect
from diptych.cluster.dialects.thoughts import ThoughtState
from diptych.cluster.dialects.tools import ToolSpec, ToolUse, custom_tool
from diptych.cluster.front.openai.parsed_format import ParsedChoice
from diptych.cluster.front.openai.tokens import TokenNames
from diptych.cluster.front.responses.output import EventLog, NoEvents, Output, Status
from diptych.cluster.front.retries.ids import IdSource
from diptych.cluster.front.text_completion import TextDelta
from diptych.cluster.routing.token_source import TokenLogprob
from diptych.workers.common.request import FinishReason

from ....support.front import byte_tokenizer
from .events import assert_order

NAMES = TokenNames(byte_tokenizer(), as_ids=False)
TOOLS = ToolUse((ToolSpec("f", {"type": "object"}), custom_tool("g", None)), "auto")
DIALECT = find_dialect("<think></think> <tool_call></tool_call>")
PIECES = (
    "<think>h\u00e9 \U0001f600</think>",
    "so ",
    '<tool_call>{"name": "f", "arguments": {"a": "<x>"}}</tool_call>',
    '<tool_call>{"name": "g", "arguments": {"input": "note \\n"}}</tool_call>',
    '<tool_call>{"name": ',
    "\n\u2028end",
)


def choice() -> ParsedChoice:
    schemas = {tool.name: tool.parameters for tool in TOOLS.tools}
    return ParsedChoice(DIALECT.parser(ThoughtState.FREE, schemas), TOOLS, IdSource(), short_ids=False, reasoning=True)


def run(deltas: list[TextDelta], status: Status, *, is_parsed: bool = True) -> tuple[list[Any], Output]:
    """All events of a response with these deltas, and its output."""
    log = EventLog(IdSource())
    output = Output(log, choice() if is_parsed else None, NAMES)

    def response(state: str) -> str:
        usage = "null" if state == "in_progress" else "{}"
        return f'"response":{{"id":"r","status":"{state}","usage":{usage},"output":[{",".join(output.items)}]}}'

    for kind in ("response.created", "response.in_progress"):
        log.add(kind, response("in_progress"))
    for delta in deltas:
        output.push(delta)
    output.end(status)
    log.add(f"response.{status.value}", response(status.value))
    events = [json.loads(event.split("\ndata: ")[1]) for event in log.take().split("\n\n")[:-1]]
    return events, output


def deltas_of(text: str, cuts: list[int], *, logprobs: bool = False) -> list[TextDelta]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[a:b] for a, b in pairwise(edges)]
    given_logprobs = (TokenLogprob(97, -1.0, ()),) if logprobs else ()
    deltas = [TextDelta(0, part, (97,), given_logprobs) for part in parts]
    return [*deltas, TextDelta(0, "", (256,), given_logprobs, finish_reason=FinishReason.STOP)]


def plain(items: list[str]) -> list[Any]:
    return [{k: v for k, v in json.loads(item).items() if k not in ("id", "call_id")} for item in items]


@given(
    st.lists(st.sampled_from(PIECES), max_size=5),
    st.lists(st.integers(0, 400), max_size=30),
    st.sampled_from([Status.COMPLETED, Status.INCOMPLETE]),
    st.booleans(),
)
def test_any_text_cut_anywhere(pieces: list[str], cuts: list[int], status: Status, logprobs: bool) -> None:
    text = "".join(pieces)
    events, output = run(deltas_of(text, cuts, logprobs=logprobs), status)
    assert_order(events)
    _, whole = run(deltas_of(text, []), status)
    if not logprobs:
        assert plain(output.items) == plain(whole.items)
    quiet = Output(NoEvents(IdSource()), choice(), NAMES)
    for delta in deltas_of(text, cuts, logprobs=logprobs):
        quiet.push(delta)
    quiet.end(status)
    assert plain(quiet.items) == plain(output.items)


def test_text_that_is_not_parsed() -> None:
    events, output = run(deltas_of(PIECES[2], [3, 9]), Status.COMPLETED, is_parsed=False)
    assert_order(events)
    [message] = plain(output.items)
    assert message["content"][0]["text"] == PIECES[2]


def test_all_kinds_in_order() -> None:
    events, output = run(deltas_of("".join(PIECES[:4]), list(range(300))), Status.COMPLETED)
    assert_order(events)
    kinds = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    assert kinds == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert [item["type"] for item in output.plain] == kinds
    thought, message, call, note = output.plain
    assert (thought["content"][0]["text"], message["content"]) == ("hé 😀", "so")
    assert (json.loads(call["arguments"]), note["input"]) == ({"a": "<x>"}, "note \n")


@pytest.mark.parametrize("text, num", [("so", 0), ("<think>hm</think>so", 9), ("<think>hm", 9), (PIECES[2], 0)])
def test_tokens_of_thoughts_are_counted(text: str, num: int) -> None:
    _, output = run(deltas_of(text, list(range(100))), Status.COMPLETED)
    assert output.num_thought_tokens == num


def test_log_probabilities_come_with_their_text() -> None:
    """Those of text that is held back, here what may begin a mark, come with it; the last event has that of the end."""
    events, _ = run(deltas_of("a<tb", [1, 2, 3], logprobs=True), Status.COMPLETED)
    deltas = [(e["delta"], len(e["logprobs"])) for e in events if e["type"] == "response.output_text.delta"]
    assert deltas == [("a", 1), ("<tb", 3), ("", 1)]
