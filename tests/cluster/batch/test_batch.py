"""`diptych batch` against an echoing front door: what it sends, writes, sends again and continues."""

import json
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from diptych.cluster.cli.main import app
from diptych.workers.common.errors import InternalError, Overloaded

from ...support.front import Echo, Served, served


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Generator[Served]:
    monkeypatch.delenv("DIPTYCH_API_KEY", raising=False)
    with served(Echo()) as found:
        yield found


def batch(url: str, file: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["batch", str(file), "--url", url, *flags])


def line(custom_id: str, **fields: object) -> dict[str, object]:
    body = {"model": "echo", "prompt": custom_id, "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body} | fields


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(found) + "\n" for found in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(text) for text in path.read_text().splitlines()]
    by_id = {entry["custom_id"]: entry for entry in found}
    assert len(by_id) == len(found), "each once"
    return by_id


def test_each_request_is_answered_once(door: Served, tmp_path: Path) -> None:
    names = [f"r{i:03}" for i in range(50)]
    chat = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    file = write(tmp_path / "b.jsonl", [*map(line, names), line("chat", url="/v1/chat/completions", body=chat)])
    result = batch(door.url, file, "--concurrency", "7")
    assert result.exit_code == 0, result.output
    assert "51 of 51 requests" in result.output
    found = read(tmp_path / "b.output.jsonl")
    assert found.keys() == {*names, "chat"}
    for name in names:
        entry = found[name]
        assert (entry["error"], entry["response"]["status_code"]) == (None, 200)
        assert entry["response"]["body"]["choices"][0]["text"] == name
        assert entry["response"]["request_id"]
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert (tmp_path / "b.errors.jsonl").read_text() == ""


def test_what_fails_is_written_apart_and_sent_again(door: Served, tmp_path: Path) -> None:
    wrong = {"model": "another", "prompt": "x"}
    file = write(tmp_path / "b.jsonl", [line("good"), line("bad", body=wrong)])
    assert batch(door.url, file).exit_code == 4
    assert read(tmp_path / "b.output.jsonl").keys() == {"good"}
    failed = read(tmp_path / "b.errors.jsonl")["bad"]
    assert (failed["response"]["status_code"], failed["error"]["code"]) == (404, "model_not_found")
    write(file, [line("good"), line("bad")])
    num_before = len(door.source.requests)
    assert batch(door.url, file, "--resume").exit_code == 0
    assert len(door.source.requests) == num_before + 1, "the answer that was there is kept"
    assert read(tmp_path / "b.output.jsonl").keys() == {"good", "bad"}
    assert (tmp_path / "b.errors.jsonl").read_text() == ""


def test_what_is_refused_for_a_time_is_sent_again(door: Served, tmp_path: Path) -> None:
    tokens_before: list[int] = []

    def fail_twice(num_tokens: int) -> InternalError | Overloaded | None:
        tokens_before.append(num_tokens)
        return Overloaded("full", retry_after_s=0.01) if len(tokens_before) < 3 else None

    door.source.fail = fail_twice
    file = write(tmp_path / "b.jsonl", [line("one")])
    result = batch(door.url, file)
    assert result.exit_code == 0, result.output
    assert len(door.source.requests) == 3


def test_what_is_always_refused_ends(door: Served, tmp_path: Path) -> None:
    door.source.admit_error = Overloaded("full", retry_after_s=0.01)
    file = write(tmp_path / "b.jsonl", [line("one"), line("two")])
    assert batch(door.url, file, "--attempts", "2").exit_code == 4
    failed = read(tmp_path / "b.errors.jsonl")
    assert {e["response"]["status_code"] for e in failed.values()} == {429}
    assert all(e["error"]["message"].startswith("full") for e in failed.values())


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["no object"], "b.jsonl:1: the line is not a JSON object"),
        ([line("a"), line("a")], "b.jsonl:2: custom_id 'a' is already that of line 1"),
        ([line("a"), line("")], "b.jsonl:2: custom_id must be a non-empty string"),
        ([line("a", method="GET")], "method must be 'POST', got 'GET'"),
        ([line("a", url="/v2/x")], "url must be a path that begins with /v1/, got '/v2/x'"),
        ([line("a", body=None)], "body must be an object"),
        ([line("a", body={"stream": True})], "a batch cannot stream"),
        ([line("a", priority=1)], "unknown field 'priority'"),
        ([], "holds no request"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_sent(
    door: Served, tmp_path: Path, lines: list[Any], said: str
) -> None:
    result = batch(door.url, write(tmp_path / "b.jsonl", lines))
    assert result.exit_code == 2
    assert said in result.output
    assert not door.source.requests
    assert not (tmp_path / "b.output.jsonl").exists()


def test_an_output_that_is_there_is_not_overwritten(door: Served, tmp_path: Path) -> None:
    file = write(tmp_path / "b.jsonl", [line("a")])
    output = tmp_path / "b.output.jsonl"
    output.write_text("mine")
    result = batch(door.url, file)
    assert result.exit_code == 2 and "--resume" in result.output
    output.write_text("mine\n")
    result = batch(door.url, file, "--resume")
    assert result.exit_code == 2 and "is no result of a batch" in result.output
    write(output, [{"custom_id": "of another"}])
    result = batch(door.url, file, "--resume")
    assert result.exit_code == 2 and "'of another'" in result.output
    assert not door.source.requests


def test_a_server_that_is_not_there_and_a_wrong_key(tmp_path: Path) -> None:
    file = write(tmp_path / "b.jsonl", [line("a")])
    with served(Echo(), api_key="right") as door:
        result = batch(door.url, file, "--api-key", "wrong")
        assert result.exit_code == 2 and "DIPTYCH_API_KEY" in result.output
        assert batch(door.url, file, "--api-key", "right", "--resume").exit_code == 0
    result = batch(door.url, file, "--resume")
    assert result.exit_code == 3 and "cannot reach" in result.output


@contextmanager
def interruptible() -> Iterator[None]:
    """Processes that start meanwhile end at SIGINT, also where these tests run in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGINT])
def test_a_batch_that_is_ended_in_its_middle_continues(
    door: Served, tmp_path: Path, with_signal: signal.Signals
) -> None:
    names = [f"r{i}" for i in range(20)]
    file = write(tmp_path / "b.jsonl", [*map(line, names)])

    def stop_at_half(_: int) -> None:
        if len(door.source.requests) >= 13:
            door.source.gate.clear()

    door.source.fail = stop_at_half
    half = door.source.all_started(13)
    command = [sys.executable, "-m", "diptych.cluster.cli.main", "batch", str(file), "--url", door.url]
    with interruptible():
        process = subprocess.Popen([*command, "--concurrency", "3"])
    with process:
        assert half.wait(60)
        process.send_signal(with_signal)
    assert process.returncode == (-signal.SIGKILL if with_signal is signal.SIGKILL else 130)
    output = tmp_path / "b.output.jsonl"
    with output.open("a") as cut:
        cut.write('{"custom_id": "r19", "resp')  # as by a kill in the middle of a write
    done = {json.loads(text)["custom_id"] for text in output.read_text().splitlines()[:-1]}
    assert 10 <= len(done) <= 13, "3 at once: all others of the 13 had their answers"
    door.source.fail = lambda _: None
    door.open_gate()
    result = batch(door.url, file, "--resume")
    assert result.exit_code == 0, result.output
    assert read(output).keys() == {*names}


def test_an_address_that_is_none_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "b.jsonl", [line("a")])
    for url in ("http://[::1", "http://.example.com", "http://127.0.0.1:x"):
        result = batch(url, file)
        assert result.exit_code == 2 and "is not an endpoint" in result.stderr, result.output
