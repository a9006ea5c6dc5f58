"""Traces and conversations read from files, and the errors for invalid files."""

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.cluster.bench.text import TokenText
from diptych.cluster.bench.traces import TraceLimits, sharegpt_sessions, trace_sessions
from diptych.cluster.bench.types import Session
from diptych.workers.common.errors import WorkloadError

from ...support.front import byte_tokenizer

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,109
2023-11-16 18:15:51.1805900,8,55
"""
SOURCE = TokenText(500)


def azure(path: Path, limits: TraceLimits) -> list[Session]:
    return trace_sessions("azure", path, limits, SOURCE, 0)


def shape(sessions: list[Session]) -> list[tuple[float | None, int, int]]:
    return [(s.at_s, s.turns[0].num_tokens, s.turns[0].max_tokens) for s in sessions]


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    sessions = azure(path, TraceLimits(10))
    assert shape(sessions) == [(0.0, 374, 44), (4.0, 396, 109), (4.5, 8, 55)]
    assert [len(s.turns[0].text) for s in sessions] == [374, 396, 8]
    limits = TraceLimits(2, time_scale=0.5, length_scale=0.25, max_input=95, max_output=20)
    assert shape(azure(path, limits)) == [(0.0, 94, 11), (2.0, 95, 20)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:15:52,x,4", "line 5: ContextTokens must be a whole number from 1"),
        ("2023-11-16 18:15:52,4", "line 5: GeneratedTokens must be a whole number from 1 .* got None"),
        ("2023-11-16 18:15:52,4,0", "line 5: GeneratedTokens must be"),
        ("2023-11-16 18:15:52,-4,9", "line 5: ContextTokens must be"),
        ("2023-11-16 18:15:52,999999999999,9", "line 5: ContextTokens must be"),
        ("yesterday,4,4", "line 5: TIMESTAMP must be a time such as"),
        ("2023-11-16 18:15:45,4,4", "line 5: TIMESTAMP .* is before the first line's"),
        ("2023-11-16 18:15:52+00:00,4,4", "line 5: TIMESTAMP"),
    ],
)
def test_bad_lines_of_azure(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{AZURE}{line}\n")
    with pytest.raises(WorkloadError, match=message):
        azure(path, TraceLimits(10))
    assert len(azure(path, TraceLimits(3))) == 3, "what is not used is not read"


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with pytest.raises(WorkloadError, match=r"cannot read .*trace\.csv: No such file"):
        azure(path, TraceLimits(1))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="it is not CSV text"):
        azure(path, TraceLimits(1))
    with pytest.raises(WorkloadError, match="it is not UTF-8 text"):
        trace_sessions("mooncake", path, TraceLimits(1), SOURCE, 0)
    path.write_text("a,b\n")
    with pytest.raises(WorkloadError, match="line 1: the columns must be TIMESTAMP"):
        azure(path, TraceLimits(1))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(WorkloadError, match="contains no request"):
        azure(path, TraceLimits(1))


def mooncake_line(**changes: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]} | changes)


def test_mooncake_blocks_of_one_hash_hold_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        mooncake_line(timestamp=3000),
        mooncake_line(timestamp=3500, input_length=1100, hash_ids=[0, 1, 2]),
        "",
        mooncake_line(timestamp=5000.0, input_length=1024, hash_ids=[0, 3]),
    ]
    path.write_text("\n".join(lines))
    sessions = trace_sessions("mooncake", path, TraceLimits(10, time_scale=2.0), SOURCE, 7)
    assert shape(sessions) == [(0.0, 600, 5), (1.0, 1100, 5), (4.0, 1024, 5)]
    first, second, third = (list(s.turns[0].text) for s in sessions)
    assert [len(p) for p in (first, second, third)] == [600, 1100, 1024]
    assert second[:600] == first
    assert third[:512] == first[:512]
    assert third[512:600] != first[512:]
    again = trace_sessions("mooncake", path, TraceLimits(10), SOURCE, 7)
    assert [list(s.turns[0].text) for s in again] == [first, second, third]
    other = trace_sessions("mooncake", path, TraceLimits(10), SOURCE, 8)
    assert list(other[0].turns[0].text) != first


def test_a_scaled_mooncake_trace_keeps_its_sharing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{mooncake_line()}\n{mooncake_line(input_length=1024, hash_ids=[0, 9])}\n")
    first, second = trace_sessions("mooncake", path, TraceLimits(10, length_scale=0.125, max_input=120), SOURCE, 0)
    assert (first.turns[0].num_tokens, second.turns[0].num_tokens) == (75, 120)
    assert list(first.turns[0].text)[:64] == list(second.turns[0].text)[:64]
    assert list(first.turns[0].text)[64:] != list(second.turns[0].text)[64:75]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is not JSON"),
        ("[]", "line 2: a JSON object is expected"),
        (mooncake_line(hash_ids=[0]), "line 2: 600 input tokens are 2 blocks of 512, but hash_ids has 1"),
        (mooncake_line(hash_ids=["a", 1]), "line 2: hash_ids must be a list of integers"),
        (mooncake_line(hash_ids=None), "line 2: hash_ids must be a list"),
        (mooncake_line(timestamp=-1), "line 2: timestamp must be a number of milliseconds of at least 0"),
        (mooncake_line(output_length=1.5), "line 2: output_length must be"),
        (mooncake_line(input_length=True), "line 2: input_length must be"),
    ],
)
def test_bad_lines_of_mooncake(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{mooncake_line()}\n{line}\n")
    with pytest.raises(WorkloadError, match=message):
        trace_sessions("mooncake", path, TraceLimits(10), SOURCE, 0)


def conversation(*said: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": what} for who, what in said]}


def test_sharegpt(tmp_path: Path) -> None:
    """A token is a byte here."""
    path = tmp_path / "chats.json"
    chats = [
        conversation(("human", "hello"), ("gpt", "good day"), ("human", "and?"), ("gpt", "no"), ("human", "bye")),
        conversation(("gpt", "I begin")),
        conversation(("system", "be kind"), ("user", "hi"), ("assistant", "ho")),
    ]
    path.write_text(json.dumps(chats))
    first, second = sharegpt_sessions(path, TraceLimits(10, max_output=7), byte_tokenizer())
    assert [(t.text, t.num_tokens, t.max_tokens) for t in first.turns] == [("hello", 5, 7), ("and?", 4, 2)]
    assert [t.text for t in second.turns] == ["hi"]
    [short] = sharegpt_sessions(path, TraceLimits(1, max_input=16), byte_tokenizer())
    assert [t.text for t in short.turns] == ["hello"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read"),
        ("{}", "must hold a JSON array"),
        ("[3]", "conversation 0: no list named `conversations`"),
        (json.dumps([conversation(("human", "a"), ("gpt", 3))]), "conversation 0, message 1: `from` and `value`"),  # type: ignore[arg-type]
        ("[]", "contains no request"),
    ],
)
def test_bad_conversations(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "chats.json"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        sharegpt_sessions(path, TraceLimits(10), byte_tokenizer())
