"""Starts an OpenAI-compatible server as anyone would, says how long its first token took, and stops it, for good or
for a while, with every process that it started.

A server's processes are known by a variable in their environment, which daemons inherit as well as children do; or as
children of such, for a process that gives itself a title may write it over its environment.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

TAG = "DIPTYCH_BENCHMARK"
MODEL_NAME = "model"
FIRST_TOKEN_S = 900.0  # vLLM's first start compiles
STOP_S = 30.0
SETTLE_S = 15.0  # at most: some servers are never idle
IDLE_SHARE = 0.1  # of a core
ASK_AGAIN_S = 0.05
MAX_CONTEXT = 4096


@dataclass(frozen=True)
class Command:
    """Command line that starts a server on a port and cores."""

    name: str
    arguments: Sequence[str]  # "{port}" stands for the port
    environment: Mapping[str, str]


def context_tokens(model: Path) -> int:
    """Number of tokens that a request may have: as many as the model has positions, MAX_CONTEXT at most."""
    config = json.loads((model / "config.json").read_text())
    return min(int(config.get("max_position_embeddings", MAX_CONTEXT)), MAX_CONTEXT)


def diptych(model: Path, pools: Mapping[str, int], threads: int, kv_gib: int, extra: Sequence[str] = ()) -> Command:
    """`pools`: workers of each, as {"mixed": 1}; `threads`: of each worker."""
    workers = [text for pool in ("prefill", "decode", "mixed") for text in (f"--{pool}", str(pools.get(pool, 0)))]
    return Command(
        "diptych",
        [
            *(sys.executable, "-m", "diptych.cluster.cli.main", "serve", str(model), *workers),
            *("--name", f"versus-{uuid.uuid4().hex[:8]}", "--http-port", "{port}", "--grpc-port", "0"),
            *("--served-model-name", MODEL_NAME, "--max-context-tokens", str(context_tokens(model))),
            *("--threads", str(threads), "--kv-memory", f"{kv_gib}GiB", *extra),
        ],
        {},
    )


def vllm(environment: Path, model: Path, cores: Sequence[int], kv_gib: int, extra: Sequence[str] = ()) -> Command:
    """Return vLLM's command at its best on a CPU: Intel's OpenMP, which vLLM's CPU build brings along, and one thread
    bound to each core."""
    openmp = next(environment.rglob("libiomp5.so"), None)
    if openmp is None:
        sys.exit(f"{environment} holds no libiomp5.so: make it anew, as --help says")
    return Command(
        "vllm",
        [
            *(str(environment / "bin" / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", "{port}"),
            *("--dtype", "bfloat16", "--served-model-name", MODEL_NAME, *extra),
            *("--max-model-len", str(context_tokens(model))),
        ],
        {
            "LD_PRELOAD": str(openmp),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        },
    )


class Server:
    """Made by `running`."""

    def __init__(self, command: Command, cores: Sequence[int], log: IO[str]) -> None:
        self.name = command.name
        self.port = _free_port()
        self._tag = uuid.uuid4().hex
        self._log = log
        start = time.perf_counter()
        bound = ["taskset", "--cpu-list", ",".join(map(str, cores))]
        self._process = subprocess.Popen(
            [*bound, *(argument.format(port=self.port) for argument in command.arguments)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | dict(command.environment) | {TAG: self._tag},
            start_new_session=True,
        )
        try:
            self._wait_for_token()
        except BaseException:
            self.stop()
            raise
        self.first_token_s = time.perf_counter() - start

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> list[psutil.Process]:
        found: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(TAG) == self._tag:
                    found |= {process, *process.children(recursive=True)}
        return list(found)

    def pause(self) -> None:
        """Stop the process, so that it takes nothing from the other one."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def settle(self) -> None:
        """Wait until the server has ended what it does after its start, as its users' first requests would find it."""
        before = self.cpu_s()
        for _ in range(int(SETTLE_S)):
            time.sleep(1.0)
            now = self.cpu_s()
            if now - before < IDLE_SHARE:
                return
            before = now

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        total = 0.0
        for process in self.processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def stop(self) -> None:
        """Idempotent."""
        self.resume()
        with suppress(subprocess.TimeoutExpired, ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(STOP_S)
        self._send(signal.SIGKILL)
        self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.send_signal(number)

    def _wait_for_token(self) -> None:
        deadline = time.monotonic() + FIRST_TOKEN_S
        while not _answers(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{self.name} did not come up: see {self._log.name}")
            time.sleep(ASK_AGAIN_S)


@contextmanager
def running(command: Command, cores: Sequence[int], logs: Path) -> Iterator[Server]:
    """The server, once its first token has come. Its output goes to a file in `logs`. It ends with this process, at
    SIGTERM too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with (logs / f"{command.name}.log").open("a") as log:
        server = Server(command, cores, log)
        try:
            yield server
        finally:
            server.stop()


def _answers(port: int) -> bool:
    """Return whether a token comes back."""
    body = json.dumps({"model": MODEL_NAME, "prompt": "a", "max_tokens": 1})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
