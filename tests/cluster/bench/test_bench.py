"""The `diptych bench` command against an echoing front door: what it prints, writes and returns."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from diptych.cluster.cli.main import app
from diptych.cluster.routing.token_source import TokenDelta
from diptych.workers.common.errors import Overloaded, WorkerLost
from diptych.workers.common.request import Request

from ...support.front import Echo, Served, byte_backend, served

# The echo's tokens are bytes, and its context holds 512.
SMALL = ("--input-tokens", "8-16", "--output-tokens", "4", "--num-requests", "12", "--vocab-size", "120")


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Generator[Served]:
    monkeypatch.delenv("DIPTYCH_API_KEY", raising=False)
    with served(Echo()) as found:
        yield found


def bench(url: str, *args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--url", url, *SMALL, *args])


def measured(url: str, path: Path, *args: str) -> dict[str, Any]:
    result = bench(url, "--json", str(path), *args)
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def prompts(door: Served) -> list[list[int]]:
    return [list(r.prompt_token_ids) for r in door.source.requests]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_random_load(door: Served, tmp_path: Path, scheme: str) -> None:
    url = door.url if scheme == "http" else f"grpc://{door.address}"
    row = measured(url, tmp_path / "a.json", "--concurrency", "3", "--plot", str(tmp_path / "a.svg"))
    assert (row["completed"], row["failed"], row["failures"], row["interrupted"]) == (12, 0, {}, False)
    assert row["settings"]["model"] == "echo"
    asked = door.source.requests[1:]  # after the warm-up
    assert len(asked) == 12
    assert row["total_input_tokens"] == sum(len(r.prompt_token_ids) for r in asked)
    assert row["total_output_tokens"] == 48
    assert row["total_cached_tokens"] == 36, "the echo says 3 each"
    assert 1 <= row["max_concurrent_requests"] <= 3
    assert {len(r.prompt_token_ids) for r in asked} <= set(range(8, 17))
    assert all(r.sampling.ignore_eos and r.sampling.temperature == 0 for r in asked)
    assert 0 < row["p50_ttft_ms"] <= row["p50_e2el_ms"]
    assert len(row["requests"]) == 12
    ElementTree.parse(tmp_path / "a.svg")


def test_the_seed_alone_chooses_the_prompts(door: Served, tmp_path: Path) -> None:
    for seed in ("1", "1", "2"):
        measured(door.url, tmp_path / "a.json", "--seed", seed, "--concurrency", "1")
    first, second, third = (sorted(prompts(door)[i : i + 13]) for i in (0, 13, 26))
    assert first == second != third


def test_shared_prefixes_at_a_rate(door: Served, tmp_path: Path) -> None:
    flags = ("--workload", "shared-prefix", "--num-prefixes", "2", "--prefix-tokens", "50", "--rate", "2000")
    row = measured(door.url, tmp_path / "a.json", *flags, "--goodput", "ttft:60000", "e2el:60000")
    assert len({tuple(p[:50]) for p in prompts(door)[1:]}) == 2
    assert row["request_goodput"] == row["request_throughput"] > 0
    assert row["settings"]["goodput"] == ["ttft:60000", "e2el:60000"]


def tokenizer_folder(tmp_path: Path) -> Path:
    """The echo's bytes; its vocabulary has no words."""
    byte_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_conversations_over_grpc_hold_what_went_before(door: Served, tmp_path: Path) -> None:
    flags = ("--workload", "multi-turn", "--turns", "3", "--num-requests", "2", "--concurrency", "1")
    row = measured(f"grpc://{door.address}", tmp_path / "a.json", *flags)
    assert row["completed"] == 6
    first, second, third = prompts(door)[1:4]
    assert second[: len(first) + 4] == first + first[:4], "the echo answers with its prompt"
    assert third[: len(second) + 4] == second + second[:4]


def test_conversations_over_http_are_chats(door: Served, tmp_path: Path) -> None:
    said = [("human", "hello"), ("gpt", "good day"), ("human", "and?"), ("gpt", "no")]
    chats = [{"conversations": [{"from": who, "value": what} for who, what in said]}]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    flags = ("--workload", "sharegpt", "--file", str(tmp_path / "chats.json"))
    folder = tokenizer_folder(tmp_path)
    row = measured(door.url, tmp_path / "a.json", *flags, "--tokenizer", str(folder), "--warmup", "0")
    assert row["completed"] == 2
    first, second = (bytes(t for t in p if t < 256).decode() for p in prompts(door))
    assert first == "hello"
    assert second == "hello" + "hellohel" + "and?"
    assert [r.sampling.max_tokens for r in door.source.requests] == [8, 2]


def test_a_trace_is_sent_at_its_times(door: Served, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": t, "input_length": 9, "output_length": 2, "hash_ids": [h]} for t, h in ((0, 0), (300, 0))]
    trace.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--workload", "mooncake", "--file", str(trace), "--time-scale", "0.1")
    row = measured(door.url, tmp_path / "a.json", *flags)
    assert row["requests"][1]["start_s"] >= 0.03 - 0.001  # what an event loop's clock counts in
    assert prompts(door)[1] == prompts(door)[2]


def test_failures_are_counted_by_kind(door: Served, tmp_path: Path) -> None:
    door.source.fail = lambda made: WorkerLost("gone") if made == 2 and len(door.source.requests) % 2 == 0 else None
    row = measured(door.url, tmp_path / "a.json", "--concurrency", "1")
    assert (row["completed"], row["failed"]) == (6, 6)
    assert row["failures"] == {"error in the stream worker_lost": 6}
    assert row["total_output_tokens"] == 24


def test_a_server_that_fails_every_request(door: Served) -> None:
    door.source.admit_error = Overloaded("full: try again")
    result = bench(door.url)
    assert result.exit_code == 3
    assert "the first request failed: HTTP 429 rate_limit_exceeded: full: try again" in result.stderr
    result = bench(door.url, "--warmup", "0")
    assert result.exit_code == 3
    assert "12 failed: HTTP 429 rate_limit_exceeded" in result.stdout
    assert "no request succeeded" in result.stderr
    result = bench(f"grpc://{door.address}", "--warmup", "0")
    assert "12 failed: rate_limit_exceeded" in result.stdout


def test_bad_input_is_named(door: Served, tmp_path: Path) -> None:
    trace = tmp_path / "bad.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:52,x,4\n")
    cases: list[tuple[int, str, tuple[str, ...]]] = [
        (2, "does not serve 'gpt-4'. It serves: echo", ("--model", "gpt-4")),
        (2, "bad.csv line 2: ContextTokens", ("--workload", "azure", "--file", str(trace))),
        (2, "the first request failed: HTTP 400", ("--input-tokens", "5000")),
        (2, "lora_path is not supported", ("--extra-body", '{"lora_path": "a"}')),
        (2, "--workload azure needs --file", ("--workload", "azure")),
        (2, "give --tokenizer", ("--workload", "multi-turn")),
        (2, "give --tokenizer", ("--api", "chat")),
        (2, "tokens that are a word", ("--tokenizer", str(tokenizer_folder(tmp_path)))),
        (2, "unexpected argument 'http://x'", ("http://x",)),
        (2, "'ttft' is not a service level", ("--goodput", "ttft")),
        (2, "--rate must be above 0", ("--rate", "0")),
        (2, "--length-scale must be a finite number", ("--length-scale", "inf")),
        (2, "--think-time must be a finite number", ("--think-time", "inf")),
        (2, "--extra-body is not JSON", ("--extra-body", "{")),
        (2, "is not a folder", ("--json", str(tmp_path / "absent" / "a.json"))),
        (2, "use --plot a.svg", ("--plot", "a.png")),
        (2, "is not an endpoint", ("--url", "127.0.0.1:80")),
        (2, "is not an endpoint", ("--url", "http://127.0.0.1:x")),
        (2, "has no port", ("--url", "grpc://127.0.0.1")),
        (2, "is not an endpoint", ("--url", "http://[::1")),
        (2, "is not an endpoint", ("--url", "http://.example.com")),
        (2, "it is a folder", ("--json", str(tmp_path))),
        (2, "the first request failed: context_length", ("--url", f"grpc://{door.address}", "--input-tokens", "5000")),
    ]
    for code, message, args in cases:
        result = bench(door.url, *args)
        assert result.exit_code == code, (args, result.output)
        assert message in result.stderr, (args, result.stderr)


def test_a_file_that_may_not_be_written_is_named_before_the_load(
    door: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    result = bench(door.url, "--json", str(tmp_path / "a.json"))
    assert result.exit_code == 2 and "you have no right to" in result.stderr and not door.source.requests


def test_a_picture_without_matplotlib_is_refused_at_once(door: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.cluster.bench.settings.find_spec", lambda _: None)
    result = bench(door.url, "--plot", "a.svg")
    assert result.exit_code == 2 and "pip install 'diptych[plot]'" in result.stderr


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_is_not_there(door: Served, scheme: str) -> None:
    port = door.http_port if scheme == "grpc" else door.grpc_port  # someone listens, but speaks otherwise
    result = bench(f"{scheme}://127.0.0.1:{port}")
    assert result.exit_code == 3
    assert "reach" in result.stderr and "at that address?" in result.stderr


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_key_is_asked_for(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPTYCH_API_KEY", raising=False)
    with served(Echo(), api_key="open sesame") as door:
        url = door.url if scheme == "http" else f"grpc://{door.address}"
        refused = bench(url)
        assert refused.exit_code == 2
        assert "API key" in refused.stderr
        row = measured(url, tmp_path / "a.json", "--api-key", "open sesame\n")
        assert row["completed"] == 12
        assert "open sesame" not in (tmp_path / "a.json").read_text()


class Stuck(Echo):
    """Its third answer never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = threading.Event()

    async def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        if len(self.requests) == 2:
            self.gate.clear()
            self.is_stuck.set()
        async for delta in super().stream(request):
            yield delta


def test_ctrl_c_shows_what_was_measured(tmp_path: Path) -> None:
    source, path = Stuck(), tmp_path / "a.json"
    with served(source) as door:

        def interrupt() -> None:
            assert source.is_stuck.wait(60)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        result = bench(door.url, "--concurrency", "1", "--warmup", "0", "--json", str(path))
        thread.join()
        door.open_gate()
        assert source.all_closed.wait(60)
    assert result.exit_code == 130
    assert "interrupted" in result.stdout
    row = json.loads(path.read_text())
    assert (row["completed"], row["failed"], row["interrupted"]) == (2, 0, True)


def test_it_imports_neither_ray_nor_torch() -> None:
    code = (
        "import sys, diptych.cluster.bench.bench\nsys.exit(bool({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
