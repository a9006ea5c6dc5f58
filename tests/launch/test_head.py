"""The machine of Ray's head dies, with the supervisor: requests go on, and when it is back the same workers are
supervised again."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diptych.cluster.placement.ray_session import make_token

from ..support.cluster_harness import CLI, Served, wait_until
from ..support.machines import Lan, Machine, end, lan
from .sites import API_KEY, RAY, START_S, load

pytestmark = [pytest.mark.e2e, pytest.mark.launch]

ADDRESSES = {"head": "192.168.1.10", "door": "192.168.1.11", "prefill": "192.168.1.12", "decode": "192.168.1.13"}
HEAD, DOOR = ADDRESSES["head"], ADDRESSES["door"]
CONFIG = """
model: tiny
pools:
  prefill: {num_cpus: 1, threads: 1, kv_memory_bytes: 64MiB, label_selector: {diptych.io/pool: prefill}}
  decode: {num_cpus: 1, threads: 1, kv_memory_bytes: 64MiB, label_selector: {diptych.io/pool: decode}}
router: {host: 0.0.0.0, http_port: 8000, grpc_port: 50051, label_selector: {diptych.io/pool: door}}
"""
MANY = 20  # requests


@pytest.fixture
def site() -> Iterator[Lan]:
    with lan("diptych") as found:
        found.add("clients", "192.168.1.2")
        make_token(token_of(found))
        for name, ip in ADDRESSES.items():
            start_ray(found, found.add(name, ip))
        yield found


def token_of(site: Lan) -> Path:
    return site.folder / "auth_token"


def environment(site: Lan) -> dict[str, str]:
    """As deploy/ray/cluster.yaml sets it, of every process."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_of(site))}
    waits = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}
    return token | waits | {"RAY_USAGE_STATS_ENABLED": "0", "DIPTYCH_API_KEY": API_KEY}


def start_ray(site: Lan, machine: Machine) -> None:
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(machine.home / "gcs")}
    is_head = machine.ip == HEAD
    role = ("--head", "--port=6379") if is_head else (f"--address={HEAD}:6379",)
    flags = (f"--labels=diptych.io/pool={machine.name}", f"--node-ip-address={machine.ip}", "--num-cpus=4")
    machine.run(
        [*RAY, "start", *role, *flags, "--object-store-memory=83886080"],
        env=environment(site) | (storage if is_head else {}),
    )


@contextmanager
def serving(site: Lan) -> Iterator[Served]:
    """`diptych serve` beside the router, which the head's death does not touch."""
    door = site.named("door")
    (door.home / "cluster.yaml").write_text(CONFIG)
    command = [*CLI, "serve", "--config", "cluster.yaml"]
    with door.start(command, env=environment(site) | {"RAY_ADDRESS": f"{HEAD}:6379"}) as process:
        served = Served(door.home, process)
        with served.reading():
            try:
                served.wait_for("Watch it", START_S)
                yield served
            finally:
                end(process, signal.SIGINT)
        print("\n".join(served.output))


def diptych(site: Lan, *command: str) -> str:
    return site.named("door").run([*CLI, *command], env=environment(site) | {"RAY_ADDRESS": f"{HEAD}:6379"})


def status(site: Lan) -> dict[str, Any]:
    return json.loads(diptych(site, "status", "--json"))


def processes(status: dict[str, Any]) -> set[tuple[str, str, int]]:
    """Identify what the supervisor watches."""
    workers = {(w["worker_id"], w["address"], w["pid"]) for w in status["workers"]}
    return workers | {(r["router_id"], r["host"], r["pid"]) for r in status["routers"]}


def test_the_machine_of_the_head_may_die(site: Lan) -> None:
    head = site.named("head")
    with serving(site) as served, load(site, DOOR) as requests:
        before = status(site)
        assert before["state"] == "ready"
        requests.until_done(MANY)
        gaps = {"before": requests.forget_gaps()}
        head.kill()
        requests.until_done(MANY)
        served.wait_for("requests go on", START_S)
        requests.until_done(MANY)
        gaps["while it was away"] = requests.forget_gaps()
        site.boot_again(head)
        start_ray(site, head)
        wait_until(lambda: status(site)["state"] == "ready", START_S)
        after = status(site)
        assert processes(after) == processes(before)
        requests.until_done(MANY)
        gaps["while it came back"] = requests.forget_gaps()
        diptych(site, "scale", "decode=2")
        assert processes(before) < processes(status(site))
        requests.until_done(MANY)
        gaps["while a pool grew"] = requests.forget_gaps()
    print(gaps)
