"""KV between two machines: by gRPC, unless an RDMA fabric is trusted; then by NIXL where there is one, else by gRPC.

This kernel has no RDMA device, so for one of the starts TCP stands for RDMA in UCX (tests/support/fabric): endpoints,
connections, reads and leases are those of NIXL between machines, the wire is not.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.machines import ROOT, lan
from ..support.ray_site import API_KEY, RaySite

pytestmark = [pytest.mark.e2e, pytest.mark.launch]

HEAD, PREFILL, DECODE = (f"192.168.1.{number}" for number in (10, 11, 12))
FABRIC = ROOT / "tests" / "support" / "fabric"
CONFIG = """
model: tiny
verify_kv: true
pools:
  prefill: {num_cpus: 1, threads: 1, kv_memory_bytes: 64MiB, label_selector: {diptych.io/pool: prefill}}
  decode: {num_cpus: 1, threads: 1, kv_memory_bytes: 64MiB, label_selector: {diptych.io/pool: decode}}
router: {host: 0.0.0.0, http_port: 8000, grpc_port: 50051, label_selector: {diptych.io/pool: head}}
"""
PROMPTS = [[3 + (seed * 7 + i * 5) % 200 for i in range(40 + 60 * seed)] for seed in range(4)]
ASK = """
import json, sys
from diptych import Client
address, key, prompts = sys.argv[1:]
with Client(address, api_key=key, timeout_s=300) as client:
    answers = [client.generate(p, max_tokens=24, temperature=0.0, ignore_eos=True) for p in json.loads(prompts)]
print(json.dumps([[a.token_ids, a.timings.transport, a.timings.handoff_bytes] for a in answers]))
"""
METRICS = """
import sys, httpx
url, key = sys.argv[1:]
print(httpx.get(url, headers={"Authorization": "Bearer " + key}, timeout=60).raise_for_status().text)
"""


@pytest.fixture
def site() -> Iterator[RaySite]:
    with lan("diptych") as found:
        site = RaySite.on(found, HEAD)
        env = {"PYTHONPATH": str(FABRIC), "FABRIC": str(fabric(site))}
        site.start_ray(site.head, env=env)
        for name, ip in (("prefill", PREFILL), ("decode", DECODE)):
            site.start_ray(found.add(name, ip), env=env)
        yield site


def fabric(site: RaySite) -> Path:
    """File that is there while TCP stands for RDMA."""
    return site.lan.folder / "fabric"


def answers(site: RaySite, config: str, transport: str) -> list[list[int]]:
    """Return the tokens of each answer, after checking that KV came by `transport`, and that all say so."""
    with site.serving(config):
        assert site.workers() == {"prefill": [PREFILL], "decode": [DECODE]}
        command = [sys.executable, "-c", ASK, f"{HEAD}:50051", API_KEY, json.dumps(PROMPTS)]
        found = json.loads(site.lan.machines[0].run(command))
        assert {name for _, name, _ in found} == {transport}
        assert all(num_bytes > 0 for _, _, num_bytes in found)
        links = [link for link in site.status()["links"] if link["num_bytes"]]
        assert [link["transport"] for link in links] == [transport] and not links[0]["num_failed"]
        assert sum(num_bytes for _, _, num_bytes in found) == links[0]["num_bytes"]
        metrics = site.lan.machines[0].run([sys.executable, "-c", METRICS, f"http://{HEAD}:8000/metrics", API_KEY])
        [line] = [line for line in metrics.splitlines() if line.startswith("diptych_link_bytes_total{")]
        assert f'transport="{transport}"' in line and float(line.rpartition(" ")[2]) == links[0]["num_bytes"]
    return [tokens for tokens, _, _ in found]


def test_kv_goes_by_grpc_unless_an_rdma_fabric_is_trusted_and_there(site: RaySite) -> None:
    by_grpc = answers(site, CONFIG, "grpc")
    trusting = f"{CONFIG}trusted_rdma_fabric: true\n"
    assert answers(site, trusting, "grpc") == by_grpc, "no machine has an RDMA device"
    fabric(site).touch()
    assert answers(site, trusting, "nixl") == by_grpc
    assert answers(site, CONFIG, "grpc") == by_grpc, "a fabric that is not trusted is not used"
