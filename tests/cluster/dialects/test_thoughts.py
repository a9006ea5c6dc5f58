"""Calls in the midst of a thought: those that end the answer are calls, others are drafts."""

import json
from collections.abc import Sequence

import pytest

from diptych.cluster.dialects.dialect import FORMATS, Dialect
from diptych.cluster.dialects.reader import MAX_HELD_CHARS
from diptych.cluster.dialects.thoughts import THINK, ThoughtState

from .test_parsers import CASES, DS, KIMI, PARIS, SCHEMAS, Read, joined

CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
DRAFT = "I write <tool_call> and a name. "
CALLS = {
    "hermes": CALL,
    "qwen3_xml": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "kimi_k2": f"{KIMI[0]}{KIMI[1]}functions.weather:0{KIMI[2]}{PARIS}{KIMI[3]}{KIMI[4]}",
    "deepseek_v3": f"{DS[0]}{DS[1]}function{DS[2]}weather\n```json\n{PARIS}\n```{DS[3]}{DS[4]}",
    "deepseek_v31": f"{DS[0]}{DS[1]}weather{DS[2]}{PARIS}{DS[3]}{DS[4]}",
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]',
    "mistral_v11": f"[TOOL_CALLS]weather[ARGS]{PARIS}",
    "llama3_json": f'{{"name": "weather", "parameters": {PARIS}}}',
    "pythonic": '<function_calls>\nweather(city="Paris")\n</function_calls>',
}


def read(name: str, pieces: Sequence[str], *, was_cut: bool = False) -> Read:
    parser = Dialect(FORMATS[name], THINK).parser(ThoughtState.OPEN, SCHEMAS)
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.end(was_cut=was_cut))


def ways(name: str, text: str, *, was_cut: bool = False) -> Read:
    """Read a text, as a whole and cut anywhere."""
    whole = read(name, [text], was_cut=was_cut)
    assert read(name, list(text), was_cut=was_cut) == whole
    for cut in range(1, len(text), 7):
        assert read(name, [text[:cut], text[cut:]], was_cut=was_cut) == whole
    return whole


def test_every_format_whose_calls_have_marks_has_an_example() -> None:
    assert CALLS.keys() == {name for name, each in FORMATS.items() if each.starts and not each.has_channels}
    assert {name for name, _, _ in CASES} >= CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("end", ["", "\n", "</think>", "\n</think>\n\n"])
def test_a_call_that_ends_the_answer_in_its_thought_is_a_call(name: str, end: str) -> None:
    found = ways(name, f"Which city?\n{CALLS[name]}{end}")
    assert (found.thought, found.text) == ("Which city?", "")
    [(tool, arguments)] = found.calls
    assert tool == "weather" and json.loads(arguments)["city"].startswith("Pa")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_an_answer_follows_is_a_part_of_the_thought(name: str) -> None:
    for answer in ("Done.", CALLS[name]):
        found = ways(name, f"Maybe {CALLS[name]} or not.</think>{answer}")
        assert found.thought == f"Maybe {CALLS[name]} or not."
        assert len(found.calls) == (answer != "Done.") and found.text in ("", "Done.")


def test_a_mark_that_begins_no_call_is_a_part_of_the_thought() -> None:
    for draft in (DRAFT, "<tool_call>{", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'):
        for end, text in (("", ""), ("</think>", ""), ("</think>Yes", "Yes")):
            assert ways("hermes", f"{draft * 3}Hm{end}") == Read(text, f"{draft * 3}Hm")
    for end in ("", "</think>"):
        found = ways("hermes", f"{DRAFT}{CALL}{end}")
        assert (found.thought, found.calls) == (DRAFT.strip(), (("weather", PARIS),))


def test_a_thought_that_the_length_cut_has_no_calls() -> None:
    for text in (f"Hm {CALL}", f"Hm {CALL}</think>", f"Hm {CALL[:50]}"):
        found = ways("hermes", text, was_cut=True)
        assert found.calls == () and found.thought == text.removesuffix("</think>")
    assert ways("hermes", f"Hm</think>{CALL}", was_cut=True).calls == (("weather", PARIS),)


def test_a_mark_that_begins_no_call_holds_few_characters_back() -> None:
    parser = Dialect(FORMATS["hermes"], THINK).parser(ThoughtState.OPEN, SCHEMAS)
    num_held = 0
    for piece in [DRAFT, *["and so on. "] * 300]:
        num_held += len(piece) - len(joined(parser.feed(piece)).thought)
        assert num_held < 600
    assert num_held <= 1


def test_a_long_thought_after_a_call_is_no_longer_held_back() -> None:
    parser = Dialect(FORMATS["hermes"], THINK).parser(ThoughtState.OPEN, SCHEMAS)
    assert joined(parser.feed(f"Hm {CALL}{'x' * 1000}")) == Read("", "Hm")
    found = joined(parser.feed("x" * (MAX_HELD_CHARS + 100)))
    assert found.thought.startswith(f" {CALL}xxx") and not found.calls


@pytest.mark.parametrize("name", ["hermes", "kimi_k2"])
def test_many_marks_are_looked_at_a_bounded_number_of_times(name: str) -> None:
    text = CALLS[name][:80] * 3_000
    found = read(name, [text[i : i + 4096] for i in range(0, len(text), 4096)])
    assert found.thought == text and not found.calls
