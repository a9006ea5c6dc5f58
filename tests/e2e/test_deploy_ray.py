"""deploy/ray/cluster-config.yaml on a Ray of three nodes, started as deploy/ray/cluster.yaml starts it: with a token,
and a label for each pool. The Ray outlives the serve, and nothing of the serve's is left on it."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.cluster.placement.ray_session import make_token
from diptych.cluster.placement.session_watchdog import has_open

from ..support.cluster_harness import END_S, Served, diptych, environment, serving, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

CONFIG = Path(__file__).parents[2] / "deploy" / "ray" / "cluster-config.yaml"
API_KEY = "the key of the clients"
POOLS = ("router", "prefill", "decode")
# What is left on a Ray: every actor and placement group, and which resources are taken.
LOOK = """
import json, ray
from ray.util import list_named_actors, placement_group_table
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
groups = [g["state"] for g in placement_group_table().values()]
print(json.dumps({
    "nodes": sum(n["Alive"] for n in ray.nodes()),
    "actors": list_named_actors(all_namespaces=True),
    "groups": [g for g in groups if g != "REMOVED"],
    "cpus": [ray.cluster_resources()["CPU"], ray.available_resources()["CPU"]],
}))
"""


@contextmanager
def ray_node(folder: Path, env: dict[str, str], *flags: str) -> Iterator[None]:
    """`ray start`, until the body ends."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--temp-dir={folder / 'ray'}"]
    command += ["--node-ip-address=127.0.0.1", "--num-cpus=16", "--object-store-memory=83886080", *flags]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output: list[str] = []
    try:
        for line in process.stdout:
            output.append(line)
            if line.rstrip().endswith("--block"):  # its last word, when all is written
                break
        else:
            raise AssertionError("".join(output))
        yield
    finally:
        process.terminate()
        process.wait(END_S)
        process.stdout.close()


@pytest.fixture
def joined() -> Iterator[dict[str, str]]:
    """The environment that leads to a Ray of three nodes on loopback."""
    # Not pytest's own: Ray's sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="joined-", dir="/tmp"))
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(make_token(folder / "auth_token"))}
    nodes = environment(folder, env | {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"})
    nodes["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    head = ("--head", "--port=0", f"--ray-client-server-port={free_port()}", "--include-dashboard=False")
    try:
        with ExitStack() as stack:
            address = ""
            for pool in POOLS:
                role = (f"--address={address}",) if address else head
                stack.enter_context(ray_node(folder, nodes, f"--labels=diptych.io/pool={pool}", *role))
                address = address or (folder / "ray" / "ray_current_cluster").read_text().strip()
            yield env | {"RAY_ADDRESS": address, "DIPTYCH_API_KEY": API_KEY}
            family = [p for p in psutil.process_iter() if has_open(p, folder)]
        assert not survivors(family)
    finally:
        shutil.rmtree(folder)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def look(home: Path, joined: dict[str, str]) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment(home, joined), capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def label(process: psutil.Process) -> str:
    """The pool in the labels of the Ray node that a process belongs to."""
    raylet = next(p for p in process.parents() if p.name() == "raylet")
    [found] = re.findall(r"diptych\.io/pool\W+(\w+)", " ".join(raylet.cmdline()))
    return found


def completion(cluster: Served, key: str) -> dict[str, Any]:
    body = json.dumps({"model": "tiny", "prompt": "What is prefill?", "max_tokens": 8, "temperature": 0})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{cluster.http_address}/v1/completions", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=END_S) as answer:
        return json.load(answer)


def test_it_serves_where_the_labels_say_and_leaves_the_ray_as_it_was(joined: dict[str, str], tmp_path: Path) -> None:
    before = look(tmp_path, joined)
    assert before == {"nodes": 3, "actors": [], "groups": [], "cpus": [48, 48]}
    flags = ("--config", str(CONFIG), "--decode", "1", "--threads", "1", "--host", "127.0.0.1")
    with serving(tmp_path / "home", *flags, env=joined) as cluster:
        assert any(f"joined Ray at {joined['RAY_ADDRESS']}" in line for line in cluster.output)
        assert not any("warning" in line for line in cluster.output), "it asks for the token"
        status = cluster.status()
        processes = {p.get("pool", "router"): psutil.Process(p["pid"]) for p in status["workers"] + status["routers"]}
        assert {pool: label(process) for pool, process in processes.items()} == {pool: pool for pool in POOLS}
        assert completion(cluster, API_KEY)["usage"]["completion_tokens"] == 8
        with pytest.raises(urllib.error.HTTPError, match="401"):
            completion(cluster, "another key")
        # From where nothing but RAY_ADDRESS leads to it, as in a pod that has been started again.
        elsewhere = diptych(tmp_path, "status", "--json", env=joined)
        assert json.loads(elsewhere.stdout)["supervisor_pid"] == status["supervisor_pid"], elsewhere.stderr
        ours = [*processes.values(), psutil.Process(status["supervisor_pid"])]
        assert cluster.end(signal.SIGTERM) == 0
        assert not survivors(ours)
        assert not list(cluster.home.iterdir())
    assert look(tmp_path, joined) == before
