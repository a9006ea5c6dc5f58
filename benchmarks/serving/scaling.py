"""Measures what users of a running cluster notice while it is scaled: a real `diptych serve`, and users who ask all the
time.

    python -m benchmarks.serving.scaling [--model DIR] [--users 50] [--steady 8] [--json FILE] [-- more flags of serve]

The cluster starts with one prefill and one decode worker. Then, one after the other: 2 + 2, 1 + 1, no prefill worker,
and one again. A row is either steady (the targets are reached) or a change (from `diptych scale` until its targets are
reached and everybody who leaves has left). Each user sends a prompt of random tokens, reads the answer as it streams,
waits a moment, and sends the next one.

TTFT counts where the request began, a gap between two tokens and a whole answer where they ended. The counts come from
the router's and the workers' metrics: resumes (attempts after the first), hand-offs that failed at the sink, migrations
of running sequences (counted when their request ends), requests that failed. Exits with 1 where a
planned change resumed or failed anything.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.request import urlopen

import numpy as np

from diptych import AsyncClient
from diptych.workers.common.errors import DiptychError

CLI = [sys.executable, "-m", "diptych.cluster.cli.main"]
READY_S = 120.0
SCALE_S = 180.0
POLL_S = 0.5
END_S = 60.0
# In order; the pools that change, as `diptych scale` takes them.
CHANGES = (("prefill=2", "decode=2"), ("prefill=1", "decode=1"), ("prefill=0",), ("prefill=1",))
COUNTS = {
    "resumes": "diptych_request_resumes_total",
    "failed_handoffs": "diptych_worker_handoffs_failed_total",
    "migrations": "diptych_request_migrations_total",
    "failed_migrations": "diptych_request_migrations_failed_total",
}


@dataclass(frozen=True)
class Answer:
    """Instants in monotonic seconds; `token_at` when each event came that held tokens."""

    sent_at: float
    token_at: tuple[float, ...]
    error: str = ""


@dataclass
class Row:
    """Results of a part of the run. Times in seconds."""

    name: str
    began_at: float
    ended_at: float = 0.0
    num_requests: int = 0
    num_failed: int = 0
    ttft_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    worst_gap_s: float = 0.0
    e2e_p50_s: float = 0.0
    e2e_p99_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def fill(self, answers: Sequence[Answer]) -> None:
        def is_here(at: float) -> bool:
            return self.began_at <= at < self.ended_at

        ended = [a for a in answers if a.token_at and not a.error and is_here(a.token_at[-1])]
        ttfts = [a.token_at[0] - a.sent_at for a in answers if a.token_at and is_here(a.sent_at)]
        gaps = [(b - a, b) for one in answers for a, b in zip(one.token_at, one.token_at[1:], strict=False)]
        self.num_requests = len(ended)
        self.num_failed = sum(bool(a.error) and is_here(a.sent_at) for a in answers)
        self.ttft_p50_s, self.ttft_p99_s = _percentiles(ttfts)
        self.e2e_p50_s, self.e2e_p99_s = _percentiles([a.token_at[-1] - a.sent_at for a in ended])
        self.worst_gap_s = max((gap for gap, at in gaps if is_here(at)), default=0.0)


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    return tuple(np.percentile(values, (50, 99)).tolist()) if values else (0.0, 0.0)


class Counters:
    """The router's metrics, read now and then: a worker that leaves takes its own with it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._newest: dict[str, float] = {}  # by metric and labels

    async def follow(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(POLL_S)

    async def read(self) -> Counter[str]:
        text = await asyncio.to_thread(lambda: urlopen(f"{self._url}/metrics").read().decode())
        for line in text.splitlines():
            if not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                self._newest[series] = float(value)
        sums: Counter[str] = Counter()
        for series, value in self._newest.items():
            for name, metric in COUNTS.items():
                sums[name] += int(value) if series.partition("{")[0] == metric else 0
        return sums


@dataclass
class Users:
    client: AsyncClient
    settings: argparse.Namespace
    answers: list[Answer] = field(default_factory=list[Answer])

    async def run(self, number: int) -> None:
        """Send requests as one user."""
        rng = random.Random(self.settings.seed * 1000 + number)
        while True:
            prompt = [rng.randrange(3, 200) for _ in range(rng.randint(20, 200))]
            num_tokens = rng.randint(self.settings.tokens // 2, self.settings.tokens)
            await self._ask(prompt, num_tokens)
            await asyncio.sleep(rng.uniform(0.0, 2 * self.settings.think))

    async def _ask(self, prompt: list[int], num_tokens: int) -> None:
        sent_at, token_at, error = time.monotonic(), list[float](), ""
        try:
            async with self.client.stream(prompt, max_tokens=num_tokens, ignore_eos=True, seed=1) as stream:
                async for _ in stream:
                    token_at.append(time.monotonic())
                if len(stream.completion.token_ids) != num_tokens:
                    error = f"{len(stream.completion.token_ids)} tokens instead of {num_tokens}"
        except DiptychError as e:
            error = f"{type(e).__name__}: {e.message}"
            print(error, file=sys.stderr)
        self.answers.append(Answer(sent_at, tuple(token_at), error))


async def measure(settings: argparse.Namespace, env: dict[str, str], http: str, grpc: str) -> list[Row]:
    counters, rows = Counters(http), list[Row]()
    async with AsyncClient(grpc, timeout_s=READY_S) as client:
        users = Users(client, settings)
        tasks = [asyncio.create_task(users.run(number)) for number in range(settings.users)]
        tasks.append(asyncio.create_task(counters.follow()))
        await asyncio.sleep(settings.warm_up)

        async def part(name: str, wait: "asyncio.Future[object]") -> None:
            before = await counters.read()
            row = Row(name, time.monotonic())
            await wait
            row.ended_at = time.monotonic()
            now = await counters.read()
            row.counts = {count: now[count] - before[count] for count in COUNTS}
            rows.append(row)

        await part("steady", asyncio.ensure_future(asyncio.sleep(settings.steady)))
        for change in CHANGES:
            await part(" ".join(change), asyncio.ensure_future(_scale(env, change)))
            await part("steady", asyncio.ensure_future(asyncio.sleep(settings.steady)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for row in rows:
        row.fill(users.answers)
    return rows


async def _scale(env: dict[str, str], change: Sequence[str]) -> None:
    """Scale the cluster, and wait until all who leave have left."""
    command = await asyncio.create_subprocess_exec(*CLI, "scale", *change, env=env, stdout=subprocess.DEVNULL)
    async with asyncio.timeout(SCALE_S):
        if await command.wait():
            sys.exit(f"diptych scale {' '.join(change)} failed")


def serve(settings: argparse.Namespace, env: dict[str, str]) -> "tuple[subprocess.Popen[str], str, str]":
    """The process, and where it serves HTTP and gRPC."""
    flags = ["--prefill", "1", "--decode", "1", "--http-port", "0", "--grpc-port", "0", *settings.flags]
    process = subprocess.Popen(
        [*CLI, "serve", settings.model, *flags], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if "Watch it" in line:
            break
    http, grpc = re.search(r"HTTP (http\S+)/v1", output), re.search(r"gRPC (\S+)", output)
    if http is None or grpc is None:
        sys.exit(output)
    return process, http[1], grpc[1]


def show(rows: Sequence[Row]) -> None:
    names = ("resumes", "failed_handoffs", "migrations", "failed_migrations")
    print("| part | s | answers | failed | TTFT p50, p99 ms | worst gap ms | answer p50, p99 s | ", end="")
    print("resumes | hand-offs failed | migrations | of which failed |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row.name} | {row.ended_at - row.began_at:.1f} | {row.num_requests} | {row.num_failed} | "
            f"{row.ttft_p50_s * 1000:.0f}, {row.ttft_p99_s * 1000:.0f} | {row.worst_gap_s * 1000:.0f} | "
            f"{row.e2e_p50_s:.2f}, {row.e2e_p99_s:.2f} | " + " | ".join(str(row.counts[name]) for name in names) + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128, help="longest answer; the shortest has half as many")
    parser.add_argument("--think", type=float, default=1.0, help="mean pause of a user between two requests, seconds")
    parser.add_argument("--steady", type=float, default=8.0, help="seconds measured between two changes")
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds before the first measurement")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="flags for `diptych serve`, after --")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "DIPTYCH_", "OMP_"))}
        env = kept | {"DIPTYCH_HOME": home, "PYTHONUNBUFFERED": "1"}
        process, http, grpc = serve(settings, env)
        try:
            rows = asyncio.run(measure(settings, env, http, grpc))
        finally:
            process.terminate()
            process.communicate(timeout=END_S)
    show(rows)
    if settings.json:
        settings.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if any(row.num_failed or row.counts["resumes"] or row.counts["failed_handoffs"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
