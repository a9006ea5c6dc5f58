"""Parsers of answers: what each family writes, however its text is cut."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.cluster.dialects.dialect import FORMATS, Dialect
from diptych.cluster.dialects.events import ArgumentsPart, CallBegin, CallEnd, Part, TextPart, ThoughtPart
from diptych.cluster.dialects.reader import MAX_HELD_CHARS, MAX_HELD_SPACES, MAX_REFUSED_CHARS, Reader
from diptych.cluster.dialects.thoughts import THINK, ThoughtState

from ...support.source import collections_that_parse

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"$ref": "#/$defs/place"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "time": {"type": "object", "properties": {}},
}
DS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
PARIS = '{"city": "Pa\\"}ris", "days": 3}'


@dataclass
class Read:
    """Parts of an answer, joined."""

    text: str = ""
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    ids: tuple[str | None, ...] = ()


def joined(parts: Sequence[Part]) -> Read:
    """Join parts, after a check of their order."""
    read, is_open = Read(), False
    for part in parts:
        match part:
            case TextPart(text):
                assert text and not is_open
                read.text += text
            case ThoughtPart(text):
                assert text and not is_open
                read.thought += text
            case CallBegin(name, call_id):
                assert not is_open
                is_open = True
                read.calls += ((name, ""),)
                read.ids += (call_id,)
            case ArgumentsPart(text):
                assert text and is_open
                name, so_far = read.calls[-1]
                read.calls = (*read.calls[:-1], (name, so_far + text))
            case CallEnd():
                assert is_open
                is_open = False
    assert not is_open
    return read


def read(name: str, pieces: Sequence[str], state: ThoughtState = ThoughtState.FREE) -> Read:
    family = FORMATS[name]
    parser = Dialect(family, None if family.has_channels else THINK).parser(state, SCHEMAS)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined(parts + parser.end())


CASES: list[tuple[str, str, Read]] = [
    (
        "hermes",
        "<think>\nWhich?\n</think>\n\nLet me see.\n<tool_call>\n"
        f'{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>{{"arguments": {{}}, "name": "time"}}'
        "</tool_call> Done",
        Read("Let me see.Done", "Which?", (("weather", PARIS), ("time", "{}"))),
    ),
    (
        "hermes",
        'a <tool_call> is no call <tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Read("a <tool_call> is no call", "", (("time", '{"a": 1}'),)),
    ),
    ("hermes", '<tool_call>{"name": "time"}', Read("", "", (("time", "{}"),))),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Pa',
        Read("", "", (("weather", '{"city": "Pa'),)),
    ),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', Read('<tool_call>{"name": 5}</tool_call>')),
    (
        "qwen3_xml",
        '<tool_call>\n<function=weather>\n<parameter=city>\nPa\n</p>"ris\n</parameter>\n<parameter=days>\n3\n'
        '</parameter>\n<parameter=where>\n{"x": [1]}\n</parameter>\n<parameter=note>\nnull\n</parameter>\n'
        "<parameter=other>\ntrue\n</parameter>\n</function>\n</tool_call>\n<function=time></function>",
        Read(
            "",
            "",
            (
                (
                    "weather",
                    '{"city": "Pa\\n</p>\\"ris", "days": 3, "where": {"x": [1]}, "note": null, "other": true}',
                ),
                ("time", "{}"),
            ),
        ),
    ),
    ("qwen3_xml", "<function=weather><parameter=city>Par", Read("", "", (("weather", '{"city": "Par'),))),
    (
        "qwen3_xml",
        "<function=weather>\n<parameter=city>\nPar<parameter=is\n<parameter=days>\n3\n<parameter=note>\nHm\n</function>\n"
        "</tool_call>",
        Read("", "", (("weather", '{"city": "Par<parameter=is", "days": 3, "note": "Hm"}'),)),
    ),
    ("qwen3_xml", "<function=>x</function>", Read("<function=>x</function>")),
    (
        "glm45",
        "<think></think>Hm\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>time</tool_call>",
        Read("Hm", "", (("weather", '{"city": "Paris", "days": 3}'), ("time", "{}"))),
    ),
    ("llama3_json", f'{{"name": "weather", "parameters": {PARIS}}}', Read("", "", (("weather", PARIS),))),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}; {{"name": "time", "parameters": {{}}}}',
        Read("", "", (("weather", PARIS), ("time", "{}"))),
    ),
    (
        "llama3_json",
        f'See {{x}} and {{"name": "Ann"}}: {{"name": "weather", "parameters": {PARIS}}}\n{{"name": "time"}} Then '
        '{"name": "time", "parameters": {}}',
        Read('See {x} and {"name": "Ann"}:Then', "", (("weather", PARIS), ("time", "{}"), ("time", "{}"))),
    ),
    (
        "llama3_json",
        'Hm <|python_tag|> {"name": "time"}; {"name": "Ann"}',
        Read('Hm; {"name": "Ann"}', "", (("time", "{}"),)),
    ),
    ("llama3_json", "Hm <|python_tag|>print(1)", Read("Hm <|python_tag|>print(1)")),
    ("llama3_json", '{"name": "Ann", "age": 5}', Read('{"name": "Ann", "age": 5}')),
    ("llama3_json", "  Hello {", Read("  Hello {")),
    (
        "pythonic",
        "[weather(city='Pa)\\'ris', days=3, where={'x': [1, -2.5, None, true]}), time()]",
        Read(
            "",
            "",
            (("weather", '{"city": "Pa)\'ris", "days": 3, "where": {"x": [1, -2.5, null, true]}}'), ("time", "{}")),
        ),
    ),
    (
        "pythonic",
        'Let me see.\n<function_calls>\nweather(city="Paris")\ntime()\n</function_calls>',
        Read("Let me see.", "", (("weather", '{"city": "Paris"}'), ("time", "{}"))),
    ),
    ("pythonic", "<|python_start|>[time()]<|python_end|>", Read("", "", (("time", "{}"),))),
    (
        "pythonic",
        "[weather(from='a, b', in=\"x=1\", user-id=[1, 2],), time()]",
        Read("", "", (("weather", '{"from": "a, b", "in": "x=1", "user-id": [1, 2]}'), ("time", "{}"))),
    ),
    ("pythonic", "[weather(city='\\ud83d\\ude00 \\ud800')]", Read("", "", (("weather", '{"city": "😀 \ufffd"}'),))),
    ("pythonic", "[weather(city=)]", Read("[weather(city=)]")),
    ("pythonic", "[weather('Paris')]", Read("[weather('Paris')]")),
    (
        "hermes",
        '<tool_call>{"name": "\\ud800", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>',
        Read("", "", (("\ufffd", '{"a": "\ufffd"}'),)),
    ),
    ("pythonic", "[1, 2] and [sleep(5)]", Read("[1, 2] and [sleep(5)]")),
    ("pythonic", "[weather(city=open('x'))]", Read("[weather(city=open('x'))]")),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}, "id": "abcdefghi"}}, '
        '{"name": "time", "arguments": {}}]',
        Read("", "", (("weather", PARIS), ("time", "{}"))),
    ),
    (
        "mistral_v11",
        f"Hm [TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{{}}",
        Read("Hm", "", (("weather", PARIS), ("time", "{}"))),
    ),
    ("mistral_v11", "[TOOL_CALLS]time{}", Read("", "", (("time", "{}"),))),
    (
        "deepseek_v3",
        f"Hm\n{DS[0]}{DS[1]}function{DS[2]}weather\n```json\n{PARIS}\n```{DS[3]}\n"
        f"{DS[1]}function{DS[2]}time\n```json\n{{}}\n```{DS[3]}{DS[4]}",
        Read("Hm", "", (("weather", PARIS), ("time", "{}"))),
    ),
    (
        "deepseek_v31",
        f"{DS[0]}{DS[1]}weather{DS[2]}{PARIS}{DS[3]}{DS[1]}time{DS[2]}{{}}{DS[3]}{DS[4]}",
        Read("", "", (("weather", PARIS), ("time", "{}"))),
    ),
    (
        "kimi_k2",
        f"{KIMI[0]}{KIMI[1]}functions.weather:0{KIMI[2]}{PARIS}{KIMI[3]}"
        f"{KIMI[1]}functions.time:1{KIMI[2]}{{}}{KIMI[3]}{KIMI[4]}",
        Read("", "", (("weather", PARIS), ("time", "{}")), ("functions.weather:0", "functions.time:1")),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Which?<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + PARIS,
        Read("Let me see.", "Which?", (("weather", PARIS),)),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.time<|channel|>commentary json"
        "<|message|>{}<|call|>",
        Read("", "Hm", (("time", "{}"),)),
    ),
    (
        "harmony",
        " to=functions.time<|channel|>commentary<|message|>{}",
        Read("", "", (("time", "{}"),)),
    ),
    ("harmony", "<|channel|>final<|message|>Hello", Read("Hello")),
    ("harmony", "Hello <|channel|>", Read("Hello <|channel|>")),
]
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)]


def test_every_format_has_an_example() -> None:
    assert {name for name, _, wanted in CASES if wanted.calls} == FORMATS.keys()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_text_cut_anywhere_is_read_as_whole(case: tuple[str, str, Read]) -> None:
    name, text, wanted = case
    whole = read(name, [text])
    assert (whole.text, whole.thought, whole.calls) == (wanted.text, wanted.thought, wanted.calls)
    if wanted.ids:
        assert whole.ids == wanted.ids
    assert read(name, list(text)) == whole
    for cut in range(1, len(text)):
        assert read(name, [text[:cut], text[cut:]]) == whole, f"cut at {text[:cut][-20:]!r}"


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_an_answer_that_ends_anywhere_is_read_the_same_however_cut(case: tuple[str, str, Read]) -> None:
    name, text, _ = case
    for end in range(len(text)):
        assert read(name, [text[:end]]) == read(name, list(text[:end]))


@pytest.mark.parametrize("case", [case for case in CASES if case[2].calls], ids=lambda case: case[0])
def test_arguments_of_whole_calls_are_json(case: tuple[str, str, Read]) -> None:
    name, text, _ = case
    if not text.endswith(("Par", '"Pa')):
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in read(name, [text]).calls)


FRAGMENTS = sorted(
    {mark for each in FORMATS.values() for mark in each.marks}
    | {"<think>", "</think>", "<function=", "<parameter=", "</parameter>", "</function>", "weather", "time", "city"}
    | {'{"name": "weather", "arguments": ', '{"name": "time"}', "{", "}", "[", "]", "(", ")", '"', "\\", ",", ":", "="}
    | {" ", "\n", "é", "functions.time:0", "```json\n", "to=", "assistant", "x" * 70, " " * (MAX_HELD_SPACES + 5)}
)


@pytest.mark.parametrize("name", FORMATS)
@given(
    pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(1, 9), max_size=30),
    data=st.data(),
)
def test_any_text_is_read_without_an_error_and_the_same_however_cut(
    name: str, pieces: list[str], cuts: list[int], data: st.DataObject
) -> None:
    state = data.draw(st.sampled_from(ThoughtState))
    text, parts, start = "".join(pieces), [], 0
    for cut in cuts:
        parts.append(text[start : start + cut])
        start += cut
    parts.append(text[start:])
    assert read(name, parts, state) == read(name, [text], state)


@pytest.mark.parametrize("name", FORMATS)
@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="<[{t"), max_size=80))
def test_text_without_marks_comes_out_as_it_is(name: str, text: str) -> None:
    assert read(name, list(text)) == Read(text)


@pytest.mark.parametrize(
    ("state", "text", "wanted"),
    [
        (ThoughtState.OPEN, "\nHm</think>\n\nYes", Read("Yes", "Hm")),
        (ThoughtState.OPEN, "<think>\nHm", Read("", "Hm")),
        (ThoughtState.DONE, "<think>Yes", Read("<think>Yes")),
        (ThoughtState.FREE, "\n<think>Hm</think>Yes", Read("Yes", "Hm")),
        (ThoughtState.FREE, "Yes <think>", Read("Yes <think>")),
    ],
)
def test_a_thought_is_as_the_prompt_began_it(state: ThoughtState, text: str, wanted: Read) -> None:
    assert read("hermes", [text], state) == read("hermes", list(text), state) == wanted


def test_a_call_of_kimi_with_a_number_alone_is_of_the_only_tool() -> None:
    text = f"{KIMI[0]}{KIMI[1]}0 {KIMI[2]}{PARIS}{KIMI[3]}{KIMI[4]}"
    parser = Dialect(FORMATS["kimi_k2"]).parser(ThoughtState.FREE, {"weather": SCHEMAS["weather"]})
    assert joined(parser.feed(text) + parser.end()).calls == (("weather", PARIS),)
    assert read("kimi_k2", [text]).calls == (), "it may be of either tool"


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = Dialect(FORMATS["hermes"]).parser(ThoughtState.FREE, {})
    assert parser.feed('Hm <tool_call>\n{"name": "weather", "arguments": {"ci') == [
        TextPart("Hm"),
        CallBegin("weather"),
        ArgumentsPart('{"ci'),
    ]
    assert parser.feed('ty"') == [ArgumentsPart('ty"')]
    assert parser.feed(": 1}") == [ArgumentsPart(": 1}")]
    assert parser.feed("}") == [CallEnd()]
    parser = Dialect(FORMATS["qwen3_xml"]).parser(ThoughtState.FREE, SCHEMAS)
    assert parser.feed("<function=weather><parameter=city>Pa")[-1] == ArgumentsPart('{"city": "Pa')


def test_a_call_in_python_is_read_while_garbage_is_collected() -> None:
    parser = Dialect(FORMATS["pythonic"]).parser(ThoughtState.FREE, SCHEMAS)
    with collections_that_parse():
        parts = parser.feed('[weather(city="Paris", note={"a": [1, [2]]})]')
    assert joined(parts).calls == (("weather", '{"city": "Paris", "note": {"a": [1, [2]]}}'),)


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_marks_without_calls_are_read_again_a_bounded_number_of_times(name: str) -> None:
    begin = '<tool_call>{"name": "' if name == "hermes" else "<function_calls>f("
    text = (begin + "x" * 2000) * 800
    reader = Reader()
    steps = FORMATS[name].read(reader, {})
    next(steps)
    found = ""
    for start in range(0, len(text), 4096):
        reader.add(text[start : start + 4096])
        next(steps, None)
        found += "".join(part.text for part in reader.take_parts() if isinstance(part, TextPart))
    reader.has_ended = True
    for _ in steps:
        pass
    reader.finish()
    found += "".join(part.text for part in reader.take_parts() if isinstance(part, TextPart))
    assert found == text
    assert MAX_REFUSED_CHARS < reader.num_refused < MAX_REFUSED_CHARS + 2 * MAX_HELD_CHARS
