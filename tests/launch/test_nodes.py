"""A cluster on five machines, each with a network of its own: KV goes between them, and one that dies, or that is cut
off, fails no request."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diptych.cluster.placement.ray_session import make_token

from ..support.cluster_harness import CLI, Served, ready_workers, wait_until
from ..support.machines import Lan, end, lan
from .sites import API_KEY, RAY, START_S, load

pytestmark = [pytest.mark.e2e, pytest.mark.launch]

ADDRESSES = {
    "router": "192.168.1.10",
    "prefill-1": "192.168.1.11",
    "prefill-2": "192.168.1.12",
    "decode-1": "192.168.1.13",
    "decode-2": "192.168.1.14",
}
CONFIG = """
model: tiny
pools:
  prefill: {replicas: 2, num_cpus: 1, threads: 1, kv_memory_bytes: 64MiB, label_selector: {diptych.io/pool: prefill}}
  decode: {replicas: 2, num_cpus: 1, threads: 1, kv_memory_bytes: 64MiB, label_selector: {diptych.io/pool: decode}}
router: {host: 0.0.0.0, http_port: 8000, grpc_port: 50051, label_selector: {diptych.io/pool: router}}
"""
HEAD = ADDRESSES["router"]
MANY = 40  # requests: more than any worker holds


@pytest.fixture
def site() -> Iterator[Lan]:
    """Machines on which Ray runs, labelled by their pools; the first is the clients'."""
    with lan("diptych") as found:
        found.add("clients", "192.168.1.2")
        for name, ip in ADDRESSES.items():
            machine = found.add(name, ip)
            if name == "router":
                make_token(token_of(found))
            role = ("--head", "--port=6379") if name == "router" else (f"--address={HEAD}:6379",)
            labels = f"--labels=diptych.io/pool={name.partition('-')[0]}"
            sizes = ("--num-cpus=4", "--object-store-memory=83886080")
            machine.run([*RAY, "start", *role, labels, f"--node-ip-address={ip}", *sizes], env=on_ray(found))
        yield found


def token_of(site: Lan) -> Path:
    return site.folder / "auth_token"


def on_ray(site: Lan) -> dict[str, str]:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_of(site))}
    return token | {"RAY_ADDRESS": f"{HEAD}:6379", "RAY_USAGE_STATS_ENABLED": "0", "DIPTYCH_API_KEY": API_KEY}


@contextmanager
def serving(site: Lan) -> Iterator[None]:
    """`diptych serve` on the head until the body ends."""
    head = site.named("router")
    (head.home / "cluster.yaml").write_text(CONFIG)
    with head.start([*CLI, "serve", "--config", "cluster.yaml"], env=on_ray(site)) as process:
        served = Served(head.home, process)
        with served.reading():
            try:
                served.wait_for("Watch it", START_S)
                yield
            finally:
                end(process, signal.SIGINT)
        print("\n".join(served.output))


def status(site: Lan) -> dict[str, Any]:
    head = site.named("router")
    return json.loads(head.run([*CLI, "status", "--json"], env=on_ray(site)))


def test_no_request_fails_where_a_machine_dies_or_is_cut_off(site: Lan) -> None:
    def workers() -> dict[str, list[str]]:
        return ready_workers(status(site))

    prefill_1, prefill_2, decode_1, decode_2 = list(ADDRESSES.values())[1:]
    with serving(site):
        assert workers() == {"prefill": [prefill_1, prefill_2], "decode": [decode_1, decode_2]}
        with load(site, HEAD) as requests:
            requests.until_done(MANY)
            links = [link for link in status(site)["links"] if link["num_bytes"]]
            assert links and {link["transport"] for link in links} == {"grpc"}
            site.named("decode-1").kill()
            requests.until_done(MANY)
            site.cut(site.named("prefill-2"))
            requests.until_done(MANY)
            wait_until(lambda: workers() == {"prefill": [prefill_1] * 2, "decode": [decode_2] * 2}, START_S)
            requests.until_done(MANY)
