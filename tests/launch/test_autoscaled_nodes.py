"""Ray's cluster autoscaler (v2) brings a node for each worker of a pool that grows, of the node type that has the
pool's label, and ends it when the pool has shrunk; by `diptych scale`, by our own autoscaler, and ahead by
`request_resources`.

The nodes are Ray's fake ones: raylets that the autoscaler starts on the head's machine. ray.cluster_utils'
`AutoscalingCluster` would start the same, but cannot be made from a released wheel of Ray: 2.60's lacks the file
autoscaler/_private/fake_multi_node/example.yaml, which its constructor opens, and the autoscaler too, for a provider of
the type `fake_multinode`. So this test does what it does, and names the provider's class as one that Ray does not know.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from ..support.cluster_harness import wait_until
from ..support.machines import lan
from ..support.ray_site import START_S, RaySite

pytestmark = [pytest.mark.e2e, pytest.mark.launch, pytest.mark.timeout(3000)]

HEAD = "192.168.1.10"
FAKE = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
HEAD_TYPE = "ray.head.default"  # as the fake provider names it, and the next
HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
CONFIG = """
model: tiny
pools:
  prefill: {replicas: 1, num_cpus: 1, threads: 1, kv_memory_bytes: 64MiB, label_selector: {diptych.io/pool: prefill}}
  decode:
    min_replicas: 1
    max_replicas: 2
    num_cpus: 1
    threads: 1
    kv_memory_bytes: 64MiB
    label_selector: {diptych.io/pool: decode}
router: {host: 0.0.0.0, http_port: 8000, grpc_port: 50051, label_selector: {diptych.io/pool: head}}
service_level: {tpot_s: 0.0001}  # of no worker: any load is too much for one
"""
ON_RAY = """
import json, sys, ray
from ray.autoscaler.sdk import request_resources
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
if len(sys.argv) > 1:
    wanted = json.loads(sys.argv[1])
    request_resources(bundles=[{"CPU": 1}] * len(wanted), bundle_label_selectors=wanted)
print(json.dumps([n["Labels"]["diptych.io/pool"] for n in ray.nodes() if n["Alive"]]))
"""
COMMANDS = ("head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
MANY = 40  # requests: more than any worker holds


def node_type(pool: str) -> dict[str, object]:
    """Nodes that have room for one worker of a pool."""
    sizes = {"CPU": 1, "object_store_memory": 83886080}
    return {"resources": sizes, "labels": {"diptych.io/pool": pool}, "node_config": {}, "max_workers": 2}


def autoscaling() -> dict[str, object]:
    """Config of a Ray that begins with its head alone, and ends nodes that were idle for 3 s."""
    head = {"resources": {"CPU": 4}, "labels": {"diptych.io/pool": "head"}, "node_config": {}, "max_workers": 0}
    provider = {"type": "external", "module": FAKE, "head_node_id": HEAD_ID, "gcs_address": f"{HEAD}:6379"}
    commands: dict[str, object] = {name: [] for name in ("setup_commands", *COMMANDS)}
    return commands | {
        "cluster_name": "fake",
        "max_workers": 4,
        "idle_timeout_minutes": 0.05,
        "provider": provider | {"launch_multiple": True, "disable_node_updaters": True},
        "available_node_types": {HEAD_TYPE: head, "prefill": node_type("prefill"), "decode": node_type("decode")},
        "head_node_type": HEAD_TYPE,
        "auth": {},
        "cluster_synced_files": [],
    }


@pytest.fixture
def site() -> Iterator[RaySite]:
    with lan("diptych") as found:
        site = RaySite.on(found, HEAD)
        site.head.run(["ip", "route", "add", "default", "dev", "eth1"])  # by which the fake nodes find their address
        (site.head.home / "autoscaling.json").write_text(json.dumps(autoscaling()))
        fake = {
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
            "RAY_NODE_TYPE_NAME": HEAD_TYPE,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        flags = ("--autoscaling-config=autoscaling.json", "--include-dashboard=False")
        site.start_ray(site.head, *flags, env=fake)
        yield site


def nodes(site: RaySite, asked: Sequence[str] | None = None) -> Counter[str]:
    """Return how many nodes of each label there are. `asked`: labels of the nodes that Ray is then asked to have in
    all, in use or not, until it is asked again."""
    asking = [json.dumps([{"diptych.io/pool": pool} for pool in asked])] if asked is not None else []
    output = site.head.run([sys.executable, "-c", ON_RAY, *asking], env=site.environment).splitlines()
    return Counter(json.loads(next(line for line in output if line.startswith("["))))  # Ray may write there too


def until_nodes(site: RaySite, limit_s: float = START_S, **wanted: int) -> None:
    """Wait until there are so many nodes of each of these labels."""
    deadline = time.monotonic() + limit_s
    found = nodes(site)
    while {pool: found[pool] for pool in wanted} != wanted:
        assert time.monotonic() < deadline, found
        found = nodes(site)


def sizes(site: RaySite) -> dict[str, int]:
    return {pool: len(found) for pool, found in site.workers().items()}


def test_a_pool_that_grows_gets_a_node_of_its_label_and_gives_it_back(site: RaySite) -> None:
    assert nodes(site) == {"head": 1}
    began = time.monotonic()
    with site.serving(CONFIG):
        print(f"from a head alone to a cluster that is ready: {time.monotonic() - began:.0f} s")
        assert nodes(site) == {"head": 1, "prefill": 1, "decode": 1}
        with site.load() as requests:
            requests.until_done(MANY)
            wait_until(lambda: sizes(site) == {"prefill": 1, "decode": 2}, START_S)
            assert nodes(site) == {"head": 1, "prefill": 1, "decode": 2}, "our own autoscaler asked for one"
            starts = {pool["name"]: pool["start_s"] for pool in site.status()["pools"]}
            print(f"starts, with their nodes: {starts}")
            grow(site, "a new node")
            requests.until_done(MANY)
            shrink(site)
            requests.until_done(MANY)
        nodes(site, asked=["prefill", "prefill"])
        until_nodes(site, prefill=2)
        assert sizes(site)["prefill"] == 1
        grow(site, "a node that request_resources brought")
        nodes(site, asked=[])
        shrink(site)
        # A worker that our own autoscaler has started stays for ten times as long as its start took.
        until_nodes(site, 10 * starts["decode"] + START_S, prefill=1, decode=1)
        assert sizes(site) == {"prefill": 1, "decode": 1}
    until_nodes(site, prefill=0, decode=0)


def grow(site: RaySite, what: str) -> None:
    began = time.monotonic()
    site.tell("scale", "prefill=2")
    print(f"diptych scale prefill=2 on {what}: {time.monotonic() - began:.0f} s")
    assert sizes(site)["prefill"] == nodes(site)["prefill"] == 2


def shrink(site: RaySite) -> None:
    site.tell("scale", "prefill=1")
    until_nodes(site, prefill=1)
