"""A worker whose ranks are on two machines with networks of their own: exact, and gone as a whole if one is cut off."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from ..support.harness import TINY
from ..support.machines import Lan, Machine, Popen, end, lan

pytestmark = [pytest.mark.e2e, pytest.mark.launch]

FIRST, SECOND = "192.168.1.10", "192.168.1.11"
TOKEN = {"DIPTYCH_AUTH_TOKEN": "the token of these machines"}
WORKER = [sys.executable, "-m", "diptych.workers.server.worker", "--model", str(TINY), "--dtype", "float32"]
WORKER += ["--threads", "1", "--kv-memory-bytes", "64MiB", "--host", FIRST]
RANK = "diptych.workers.execution.rank"
END_S = 60.0  # TCP's probes take 20 s to find that a machine is gone
ASK = """
import asyncio, json, os, sys
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.workers.common.request import Request, SamplingParams

async def main(workers):
    router = Router(RoutingConfig(worker_timeout_s=60.0), os.environ["DIPTYCH_AUTH_TOKEN"])
    await router.start()
    router.update_fleet([WorkerInfo(of["incarnation"], of["address"], role, role) for role, of in workers.items()])
    while not all(state.is_up for state in router.workers()):
        await asyncio.sleep(0.01)
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    for size in (3, 40, 200):
        prompt = tuple(3 + 7 * i % 200 for i in range(size))
        request = Request("r", prompt, sampling, timeout_s=120.0, cache_salt=sys.argv[1].encode())
        print(json.dumps([token async for delta in router.stream(request) for token in delta.token_ids]))
    await router.stop()

asyncio.run(main(json.loads(sys.argv[1])))
"""


@pytest.fixture
def network() -> Iterator[Lan]:
    with lan("diptych") as found:
        found.add("first", FIRST)
        found.add("second", SECOND)
        yield found


@contextmanager
def started(machine: Machine, argv: list[str]) -> Iterator[tuple[Popen, dict[str, str]]]:
    """Start a worker or a rank host, and read what it says once it is ready."""
    process = machine.start(argv, env=TOKEN)
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if line.startswith("{")), None)
        assert ready is not None, f"it ended with {process.wait()}"
        yield process, json.loads(ready)
    finally:
        end(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def spread(network: Lan) -> Iterator[tuple[Popen, Popen, dict[str, str]]]:
    """A worker of two ranks, one on each machine, after the rank host of the second."""
    first, second = network.machines
    host = [sys.executable, "-m", "diptych.workers.server.rank_host", "--listen", f"{SECOND}:0"]
    with started(second, host) as (rank_host, listening):
        on_two = ["--machines-per-worker", "2", "--rank-hosts", listening["address"], "--trusted-network"]
        with started(first, [*WORKER, "--tensor-parallel", "2", *on_two]) as (worker, ready):
            yield rank_host, worker, ready


def answers(machine: Machine, **workers: dict[str, str]) -> str:
    """Tokens of each prompt, from workers by their roles."""
    return machine.run([sys.executable, "-c", ASK, json.dumps(workers)], env=TOKEN)


def test_ranks_on_two_machines_are_exact_and_end_together(network: Lan) -> None:
    first, second = network.machines
    with started(first, WORKER) as (_, alone), spread(network) as (host, worker, several):
        expected = answers(first, mixed=alone)
        assert answers(first, mixed=several) == expected
        assert answers(first, prefill=alone, decode=several) == expected
        assert answers(first, prefill=several, decode=alone) == expected
        ranks = [of for of in psutil.Process(host.pid).children(recursive=True) if RANK in of.cmdline()]
        assert len(ranks) == 1
        network.cut(second)
        assert worker.wait(END_S)
        _, alive = psutil.wait_procs(ranks, END_S)
        assert not alive and host.poll() is None, "the rank host stays, and waits for the next worker"
