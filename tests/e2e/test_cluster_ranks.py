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

from ..support.cluster_harness import READY_S, Served, diptych, load, serving, wait_until
from ..support.harness import TINY, workers
from ..support.supervised import generate
from ..support.two_nodes import node_of, two_nodes

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

SETTINGS = """
name: spread
dtype: float32
trusted_network: true
pools:
  decode: {tensor_parallel: 2, machines_per_worker: 2, num_cpus: 2, threads: 2}
  mixed: {replicas: 0, threads: 1}
router: {worker_wait_s: 300}  # a busy machine starts workers slowly
"""
PROMPTS = [[3 + (seed * 7 + i * 5) % 200 for i in range(20 + 50 * seed)] for seed in range(3)]
NUM_TOKENS = 12


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


def test_ranks_on_two_nodes_answer_exactly_and_are_replaced_together(served: Served) -> None:
    [worker] = spread_workers(served)
    assert len(worker["rank_host_nodes"]) == 1
    [host] = rank_hosts(worker)
    assert node_of(host.pid) != node_of(worker["pid"])
    assert len(ranks := host.children()) == 1

    with workers(TINY, ["mixed"], dtype="float32") as [alone], Client(served.grpc_address) as client:
        for prompt in PROMPTS:
            answer = client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == asyncio.run(told(alone.address, prompt))

    scaled = diptych(served.home, "scale", "mixed=1", "--name", "spread", timeout_s=2 * READY_S, env=served.env)
    assert scaled.returncode == 0, scaled.stderr

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


async def told(address: str, prompt: list[int]) -> list[int]:
    return [token async for token in generate(address, prompt, max_tokens=NUM_TOKENS)]
