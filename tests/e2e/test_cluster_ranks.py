"""A cluster with a worker whose ranks are on two nodes of a Ray: placed, exact, and replaced as a whole."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych import Client
from diptych.workers.common.exit_codes import UNAVAILABLE

from ..support.cluster_harness import READY_S, Served, diptych, load, serving, wait_until
from ..support.harness import TINY, WorkerHandle, workers
from ..support.two_nodes import node_of, two_nodes
from .test_tensor_parallel import NUM_TOKENS, answer, routed

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

SETTINGS = """
dtype: float32
trusted_network: true
pools:
  decode: {tensor_parallel: 2, machines_per_worker: 2, num_cpus: 10, threads: 2}  # a node has 8
  mixed: {replicas: 0, threads: 1}
router: {worker_wait_s: 300}  # a busy machine starts workers slowly
"""
PROMPTS = [[3 + (seed * 7 + i * 5) % 200 for i in range(20 + 50 * seed)] for seed in range(3)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "cluster.yaml").write_text(SETTINGS)
    with two_nodes(tmp_path) as ray, serving(tmp_path, "--config", "cluster.yaml", env=ray) as found:
        yield found


def spread_workers(served: Served) -> list[dict[str, Any]]:
    return [w for w in served.status()["workers"] if w["pool"] == "decode"]


def rank_hosts(worker: dict[str, Any]) -> list[psutil.Process]:
    """Processes of rank hosts on the nodes of a Ray that has one worker of several machines."""
    raylet = psutil.Process(worker["pid"]).parent()
    assert raylet is not None
    ray = raylet.parent()
    assert ray is not None
    return [p for p in ray.children(recursive=True) if "RankHostActor" in "".join(p.cmdline())]


def scale(served: Served, pools: str, timeout_s: float = 2 * READY_S) -> int:
    run = diptych(served.home, "scale", pools, "--timeout", f"{timeout_s}", timeout_s=3 * READY_S, env=served.env)
    return run.returncode


def test_ranks_on_two_nodes_answer_exactly_and_are_replaced_together(served: Served) -> None:
    [worker] = spread_workers(served)
    assert len(worker["rank_host_nodes"]) == 1
    [host] = rank_hosts(worker)
    assert node_of(host.pid) != node_of(worker["pid"])
    assert len(ranks := host.children()) == 1

    with workers(TINY, ["mixed"], dtype="float32") as [alone], Client(served.grpc_address) as client:
        expected = asyncio.run(answers_of(alone))
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            found = client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            assert list(found.token_ids) == tokens

    assert scale(served, "decode=2", timeout_s=1.0) == UNAVAILABLE
    wait_until(lambda: {w["waiting_for"] for w in spread_workers(served)} == {"", "2 nodes, each with CPU: 5"}, READY_S)
    assert scale(served, "decode=1") == 0
    os.kill(before := served.status()["supervisor_pid"], signal.SIGKILL)
    wait_until(lambda: served.status()["supervisor_pid"] != before, READY_S)
    wait_until(lambda: [w["pid"] for w in spread_workers(served)] == [worker["pid"]], READY_S)
    assert rank_hosts(worker) == [host], "a new supervisor finds both"
    assert scale(served, "mixed=1") == 0

    async def kill_the_host() -> None:
        async with load(served.grpc_address, num_tokens=24) as result:
            await result.until_done(6)
            host.send_signal(signal.SIGKILL)
            await result.until_done(6)
            await asyncio.to_thread(wait_until, lambda: is_replaced(served, worker), 2 * READY_S)
            await result.until_done(6)
        assert not result.errors

    asyncio.run(kill_the_host())
    [other] = spread_workers(served)
    [other_host] = rank_hosts(other)
    assert other_host.pid != host.pid and not psutil.wait_procs(ranks, timeout=10.0)[1]
    served.assert_nothing_is_held()
    os.kill(other["pid"], signal.SIGKILL)
    assert not psutil.wait_procs([other_host], timeout=READY_S)[1], "a rank host ends with its worker"


def is_replaced(served: Served, worker: dict[str, Any]) -> bool:
    now = spread_workers(served)
    return [w["phase"] for w in now] == ["ready"] and now[0]["worker_id"] != worker["worker_id"]


async def answers_of(worker: WorkerHandle) -> list[list[int]]:
    async with routed(worker) as router:
        return [await answer(router, prompt, b"") for prompt in PROMPTS]
