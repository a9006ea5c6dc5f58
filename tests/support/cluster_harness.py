"""`diptych serve` as a user runs it, in a separate process and folder; and what remains afterwards."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from diptych import AsyncClient
from diptych.workers.common.errors import DiptychError

CLI = [sys.executable, "-m", "diptych.cluster.cli.main"]
STATUS = [sys.executable, str(Path(__file__).with_name("status_process.py"))]
MODEL = "tiny"
READY_S = 120.0
END_S = 60.0
POLL_S = 0.1  # between two looks


def environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's, less what would lead to another cluster; and `more`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "DIPTYCH_", "OMP_"))}
    return kept | {"DIPTYCH_HOME": str(home), "PYTHONUNBUFFERED": "1"} | dict(more or {})


def diptych(
    home: Path,
    *args: str,
    cwd: Path | None = None,
    timeout_s: float = READY_S,
    env: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run(
        [*CLI, *args],
        env=environment(home, env),
        cwd=cwd or home,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class StatusProcess:
    """Tells the status of a running cluster; started when first asked."""

    def __init__(self, home: Path, env: Mapping[str, str] | None, name: str = "default") -> None:
        self._home = home
        self._env = env
        self._name = name
        self._process: subprocess.Popen[str] | None = None
        self._asked_at = -math.inf

    def ask(self, question: str = "status") -> dict[str, Any]:
        """Answer of `diptych status --json`; "check": with `--check`."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        time.sleep(
            max(self._asked_at + POLL_S - time.monotonic(), 0.0)
        )  # who asks again and again leaves others a core
        self._asked_at = time.monotonic()
        process.stdin.write(f"{question}\n")
        answer = process.stdout.readline()
        if not answer:
            self.close()
        assert answer, "the cluster's status is not to be had: the reason is in the standard error"
        return json.loads(answer)

    def close(self) -> None:
        if self._process is not None:
            with self._process:  # closes its standard input, which ends it
                self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*STATUS, self._name],
            env=environment(self._home, self._env),
            cwd=self._home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )


@dataclass
class Served:
    """A `diptych serve` that runs. `output` grows while it does."""

    home: Path
    process: "subprocess.Popen[str]"
    env: Mapping[str, str] | None = None
    output: list[str] = field(default_factory=list[str])
    has_ended: bool = False  # the output
    _grew: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._status = StatusProcess(self.home, self.env)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read the output on a thread of its own, which has ended when the body has: the process must have, too."""
        reader = threading.Thread(target=self._read)
        reader.start()
        try:
            yield
        finally:
            reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grew:
                self.output.append(line.rstrip("\n"))
                self._grew.notify_all()
        with self._grew:
            self.has_ended = True
            self._grew.notify_all()

    def wait_for(self, words: str, limit_s: float = READY_S) -> None:
        """Wait until a line of the output has these words."""

        def is_there() -> bool:
            return any(words in line for line in self.output)

        with self._grew:
            self._grew.wait_for(lambda: self.has_ended or is_there(), limit_s)
        assert is_there(), "\n".join(self.output)

    def close(self) -> None:
        """End the process that tells the status."""
        self._status.close()

    def last_line(self) -> str:
        """Wait for the end of the output, when the last process ends that could write it; return its last line."""
        with self._grew:
            assert self._grew.wait_for(lambda: self.has_ended, END_S), "\n".join(self.output)
        return self.output[-1]

    def snippet(self, title: str) -> str:
        """The banner's lines under `# title`."""
        start = self.output.index(f"# {title}") + 1
        return "\n".join(self.output[start : self.output.index("", start)])

    def status(self, question: str = "status") -> dict[str, Any]:
        return self._status.ask(question)

    @property
    def grpc_address(self) -> str:
        return next(line.split("gRPC ")[1] for line in self.output if "gRPC 127" in line)

    @property
    def http_address(self) -> str:
        return next(line.split("HTTP ")[1].split("/v1")[0] for line in self.output if "HTTP http" in line)

    def assert_nothing_is_held(self) -> None:
        """Waits until every request has ended on its worker; then all blocks must be free, and the books right."""
        deadline = time.monotonic() + END_S
        while True:
            status = self.status("check")
            workers = status["workers"]
            if not any(w["num_running"] or w["num_waiting"] or w["num_leased_blocks"] for w in workers):
                break
            assert time.monotonic() < deadline, workers
        assert [w["num_free_blocks"] for w in workers] == [w["num_blocks"] for w in workers]
        assert status["problems"] == {}, status["problems"]

    def family(self) -> list[psutil.Process]:
        """Every process of the cluster, this one's included."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def end(self, number: signal.Signals) -> int:
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)  # as a terminal does: to everything in the foreground
        else:
            self.process.send_signal(number)
        return self.process.wait(END_S)


def survivors(family: list[psutil.Process], within_s: float = 10.0) -> list[str]:
    """Return the processes that are still there after `within_s`."""
    _, alive = psutil.wait_procs(family, timeout=within_s)
    return [f"{p.pid} {p.name()}" for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def serving(
    home: Path, *args: str, model: str = MODEL, wait: bool = True, env: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Serve on free ports; whatever the test did, nothing of it is there afterwards."""
    home.mkdir(parents=True, exist_ok=True)
    command = [*CLI, "serve", model, "--http-port", "0", "--grpc-port", "0", "--kv-memory", "64MiB", *args]
    process = subprocess.Popen(
        command,
        env=environment(home, env),
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    served = Served(home, process, env)
    family: list[psutil.Process] = []
    with process, served.reading():
        try:
            if wait:
                served.wait_for("Watch it")
            yield served
        finally:
            served.close()
            if process.poll() is None:
                family = served.family()
                process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            left = survivors(family)
            for victim in family:
                if victim.is_running():
                    victim.kill()
    assert not left, left


def output_until_ready(process: "subprocess.Popen[str]") -> list[str]:
    """Read what a `diptych serve` prints until it is ready. Raises AssertionError where it ends before."""
    assert process.stdout is not None
    output: list[str] = []
    for line in process.stdout:
        output.append(line)
        if line.startswith("Watch it"):
            return output
    raise AssertionError("".join(output))


@contextmanager
def lone_router(
    home: Path, *args: str, env: Mapping[str, str] | None = None
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run `diptych router`; give its process, and the URL of its front door."""
    with subprocess.Popen(
        [*CLI, "router", *args], env=environment(home, env), cwd=home, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, "http://" + process.stdout.readline().split()[2]
        finally:
            process.kill()


def ready_workers(status: dict[str, Any]) -> dict[str, list[str]]:
    """Return the addresses of each pool's workers that are ready, of a `diptych status --json`."""
    found: dict[str, list[str]] = {}
    for worker in status["workers"]:
        if worker["phase"] == "ready":
            found.setdefault(worker["pool"], []).append(worker["address"].rpartition(":")[0])
    return {pool: sorted(addresses) for pool, addresses in found.items()}


def wait_until(is_so: Callable[[], bool], limit_s: float) -> None:
    """Ask again and again. Raises AssertionError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


@dataclass
class Load:
    """Outcomes of the requests of a load."""

    num_tokens: int
    num_done: int = 0
    num_started: int = 0
    errors: list[DiptychError] = field(default_factory=list[DiptychError])
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    longest_gap_s: float = 0.0  # between two pieces of one answer
    longest_silence_s: float = 0.0  # in which no client was sent anything
    _heard_at: float | None = None

    def forget_gaps(self) -> None:
        self.longest_gap_s = self.longest_silence_s = 0.0

    def _hear(self, before: float) -> float:
        """Note that a client was sent something, which had been sent something before, or a request; return when."""
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - before)
        self.longest_silence_s = max(self.longest_silence_s, now - (self._heard_at or now))
        self._heard_at = now
        return now

    async def until_done(self, number: int) -> None:
        """Wait until `number` more requests have ended."""
        goal = self.num_done + len(self.errors) + number
        while self.num_done + len(self.errors) < goal:
            self.progress.clear()
            await self.progress.wait()

    async def run(self, client: AsyncClient, seed: int, stop: asyncio.Event) -> None:
        """Send one request after another."""
        while not stop.is_set():
            self.num_started += 1
            prompt = [3 + (seed * 7 + i * (self.num_started % 11 + 1)) % 200 for i in range(40)]
            try:
                stream = client.stream(prompt, max_tokens=self.num_tokens, ignore_eos=True, temperature=0.0)
                heard_at = time.monotonic()
                async for _ in stream:
                    heard_at = self._hear(heard_at)
                answer = stream.completion
            except DiptychError as e:
                self.errors.append(e)
            else:
                assert len(answer.token_ids) == self.num_tokens
                self.num_done += 1
            self.progress.set()


@asynccontextmanager
async def load(
    address: str, *, num_clients: int = 6, num_tokens: int = 48, api_key: str | None = None
) -> AsyncIterator[Load]:
    """Clients that keep the cluster busy while the body runs; on leaving, every request has ended."""
    result, stop = Load(num_tokens), asyncio.Event()
    async with AsyncClient(address, timeout_s=60.0, api_key=api_key) as client, asyncio.TaskGroup() as group:
        for seed in range(num_clients):
            group.create_task(result.run(client, seed, stop))
        try:
            yield result
        finally:
            stop.set()
    assert result.num_done + len(result.errors) == result.num_started
