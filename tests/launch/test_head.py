"""The machine of Ray's head dies, with the supervisor: requests go on, and when it is back the same workers are
supervised again."""

from collections.abc import Iterator
from typing import Any

import pytest

from ..support.cluster_harness import wait_until
from ..support.machines import lan
from ..support.ray_site import START_S, RaySite

pytestmark = [pytest.mark.e2e, pytest.mark.launch]

HEAD = "192.168.1.10"
ADDRESSES = {"door": "192.168.1.11", "prefill": "192.168.1.12", "decode": "192.168.1.13"}
CONFIG = """
model: tiny
pools:
  prefill: {num_cpus: 1, threads: 1, kv_memory_bytes: 64MiB, label_selector: {diptych.io/pool: prefill}}
  decode: {num_cpus: 1, threads: 1, kv_memory_bytes: 64MiB, label_selector: {diptych.io/pool: decode}}
router: {host: 0.0.0.0, http_port: 8000, grpc_port: 50051, label_selector: {diptych.io/pool: door}}
"""
MANY = 20  # requests


@pytest.fixture
def site() -> Iterator[RaySite]:
    """Machines on which Ray runs. `diptych serve` and the router are not on that of Ray's head."""
    with lan("diptych") as found:
        site = RaySite.on(found, HEAD)
        start_head(site)
        for name, ip in ADDRESSES.items():
            site.start_ray(found.add(name, ip))
        site.door = found.named("door")
        yield site


def start_head(site: RaySite) -> None:
    """As deploy/ray/cluster.yaml does."""
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(site.head.home / "gcs")}
    site.start_ray(site.head, env=storage)


def processes(status: dict[str, Any]) -> set[tuple[str, str, int]]:
    """Identify what the supervisor watches."""
    workers = {(w["worker_id"], w["address"], w["pid"]) for w in status["workers"]}
    return workers | {(r["router_id"], r["host"], r["pid"]) for r in status["routers"]}


def test_the_machine_of_the_head_may_die(site: RaySite) -> None:
    with site.serving(CONFIG) as served, site.load() as requests:
        before = site.status()
        assert before["state"] == "ready"
        requests.until_done(MANY)
        gaps = {"before": requests.forget_gaps()}
        site.head.kill()
        requests.until_done(MANY)
        served.wait_for("requests go on", START_S)
        requests.until_done(MANY)
        gaps["while it was away"] = requests.forget_gaps()
        site.lan.boot_again(site.head)
        start_head(site)
        wait_until(lambda: site.status()["state"] == "ready", START_S)
        after = site.status()
        assert processes(after) == processes(before)
        requests.until_done(MANY)
        gaps["while it came back"] = requests.forget_gaps()
        site.tell("scale", "decode=2")
        assert processes(before) < processes(site.status())
        requests.until_done(MANY)
        gaps["while a pool grew"] = requests.forget_gaps()
    print(gaps)
