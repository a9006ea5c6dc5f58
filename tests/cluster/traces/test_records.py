"""Readers of request traces: BurstGPT and Bailian here, Azure and Mooncake through the bench's tests."""

import json
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
