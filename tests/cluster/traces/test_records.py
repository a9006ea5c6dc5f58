"""Readers of request traces: BurstGPT and Bailian here, Azure and Mooncake through the bench's tests."""

import gzip
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diptych.cluster.traces.records import TraceRequest, read_trace
from diptych.workers.common.errors import WorkloadError

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


def bailian(**changes: object) -> str:
    line = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 20, "output_length": 3}
    return json.dumps(line | {"type": "text", "turn": 1, "hash_ids": [7, 8]} | changes)


def test_burstgpt_leaves_out_requests_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(BURSTGPT)
    assert read_trace("burstgpt", path, 10) == [TraceRequest(0.0, 472, 18), TraceRequest(113.0, 417, 276)]
    assert len(read_trace("burstgpt", path, 1)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x,ChatGPT,1,1,2,API log", "line 5: Timestamp must be a number of seconds"),
        ("nan,ChatGPT,1,1,2,API log", "line 5: Timestamp must be a number of seconds"),
        ("130,ChatGPT,-1,1,2,API log", "line 5: Request tokens must be"),
        ("130,ChatGPT", "line 5: Request tokens must be a whole number from 0 .* got None"),
    ],
)
def test_bad_lines_of_burstgpt(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(f"{BURSTGPT}{line}\n")
    with pytest.raises(WorkloadError, match=message):
        read_trace("burstgpt", path, 10)


def test_bailian_names_blocks_of_sixteen_tokens(tmp_path: Path) -> None:
    path = tmp_path / "bailian.jsonl"
    path.write_text(f"{bailian(timestamp=63)}\n\n{bailian(hash_ids=[7, 9], input_length=32)}\n")
    assert read_trace("bailian", path, 10) == [TraceRequest(0.0, 32, 3, [7, 9]), TraceRequest(1.5, 20, 3, [7, 8])]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (bailian(hash_ids=[7]), "line 2: 20 input tokens are 2 blocks of 16, but hash_ids has 1"),
        (bailian(timestamp=True), "line 2: timestamp must be a number of seconds"),
        (bailian(timestamp=-1), "line 2: timestamp must be a number of seconds"),
        (bailian(output_length=0), "line 2: output_length must be"),
    ],
)
def test_bad_lines_of_bailian(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bailian.jsonl"
    path.write_text(f"{bailian()}\n{line}\n")
    with pytest.raises(WorkloadError, match=message):
        read_trace("bailian", path, 10)


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_file_of_a_spreadsheet_or_compressed(tmp_path: Path, is_compressed: bool, newline: str) -> None:
    """With a mark of its byte order, which would be part of the first column's name, and lines as on Windows."""
    content = BURSTGPT.replace("\n", newline).encode("utf-8-sig")
    path = tmp_path / "burst.csv"
    path.write_bytes(gzip.compress(content) if is_compressed else content)
    assert read_trace("burstgpt", path, 10) == [TraceRequest(0.0, 472, 18), TraceRequest(113.0, 417, 276)]
    path = tmp_path / "bailian.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + bailian().encode())
    assert len(read_trace("bailian", path, 10)) == 1


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:9] + b"\xff" * 40, lambda data: data[:2]]
)
def test_a_compressed_file_that_is_broken_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    for name in ("burstgpt", "bailian"):
        path = tmp_path / name
        path.write_bytes(damage(gzip.compress(BURSTGPT.encode() * 9)))
        with pytest.raises(WorkloadError, match=str(path)):
            read_trace(name, path, 100)


def test_a_pipe_is_read_from_its_first_byte(tmp_path: Path) -> None:
    """As `--trace <(zcat trace.csv.gz)` gives it, or /dev/stdin."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(path.write_text, BURSTGPT)
        assert len(read_trace("burstgpt", path, 10)) == 2
        writing.result()


def mooncake(**changes: object) -> str:
    return json.dumps(
        {"timestamp": 1_700_000_000_123.5, "input_length": 9, "output_length": 2, "hash_ids": [1]} | changes
    )


def test_times_of_a_clock_are_taken_in_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(f"{mooncake()}\n{mooncake(timestamp=1_700_000_001_124)}\n")
    assert [request.at_s for request in read_trace("mooncake", path, 9)] == [0.0, pytest.approx(1.0005)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (mooncake(timestamp=float("nan")), "line 2: timestamp must be a number of milliseconds"),
        (mooncake(timestamp=10**400), "line 2: timestamp must be a number of milliseconds"),
        (mooncake(hash_ids=[1 << 64]), "line 2: hash_ids must be a list of integers from 0 to"),
        (mooncake(input_length="9" * 5000), "line 2: input_length must be a whole number"),
        ("[" * 100_000, "line 2: it is not JSON"),
    ],
)
def test_numbers_that_no_trace_has(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(f"{mooncake()}\n{line}\n")
    with pytest.raises(WorkloadError, match=message):
        read_trace("mooncake", path, 10)
