"""What the pods of deploy/kubernetes run, on a Ray whose nodes have the labels and CPUs of its groups: the settings of
`local`, the command of the router's pod, the path of its probe, the command that ends a worker's pod."""

import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from diptych.cluster.placement.ray_session import make_token

from ..deploy.manifests import objects, one, pods
from ..support.cluster_harness import END_S, READY_S, diptych, environment, lone_router, serving, wait_until
from .test_deploy_ray import API_KEY, free_port, ray_node

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.long]

LOCAL = objects("local")
GROUPS = one(LOCAL, "RayCluster")["spec"]["workerGroupSpecs"]
[ROUTER] = [pod for pod in pods(LOCAL) if pod.component == "router"]


@pytest.fixture
def joined() -> Iterator[dict[str, str]]:
    """The environment that leads to a Ray of a node for the head and one for each group, on loopback."""
    folder = Path(tempfile.mkdtemp(prefix="joined-", dir="/tmp"))  # Ray's sockets need a short path
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(make_token(folder / "auth_token"))}
    nodes = environment(folder, env | {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"})
    nodes["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    head = ("--head", "--port=0", f"--ray-client-server-port={free_port()}", "--include-dashboard=False")
    try:
        with ExitStack() as stack:
            stack.enter_context(ray_node(folder, nodes, "--num-cpus=0", *head))
            address = (folder / "ray" / "ray_current_cluster").read_text().strip()
            for group in GROUPS:
                [(name, value)] = group["labels"].items()
                [container] = group["template"]["spec"]["containers"]
                cpus = int(container["resources"]["limits"]["cpu"]) * group["replicas"]
                flags = (f"--address={address}", f"--labels={name}={value}", f"--num-cpus={cpus}")
                stack.enter_context(ray_node(folder, nodes, *flags))
            yield env | {"RAY_ADDRESS": address, "DIPTYCH_API_KEY": API_KEY}
    finally:
        shutil.rmtree(folder)


@contextmanager
def router(home: Path, joined: dict[str, str]) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    """What the router's pod runs after `ray start`, and the URL of its front door. It knows no API key by itself."""
    words = shlex.split(ROUTER.container["args"][0].splitlines()[-1].removeprefix("exec diptych router "))
    env = {key: value for key, value in joined.items() if not key.startswith("DIPTYCH_")}
    with lone_router(home, *words, env=env) as found:
        yield found


def test_the_pods_commands_serve_drain_and_start_again(joined: dict[str, str], tmp_path: Path) -> None:
    settings = yaml.safe_load(one(LOCAL, "ConfigMap")["data"]["cluster.yaml"])
    settings["router"] |= {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0}
    (config := tmp_path / "cluster.yaml").write_text(yaml.safe_dump(settings))
    (elsewhere := tmp_path / "pod").mkdir()
    with serving(tmp_path / "home", "--config", str(config), env=joined) as cluster:
        cluster.wait_for("No router is started here")
        with router(elsewhere, joined) as (process, url):
            probe = ROUTER.container["readinessProbe"]["httpGet"]["path"]
            assert httpx.get(url + probe, timeout=60).status_code == 200
            assert sum(w["num_decode_tokens"] for w in cluster.status()["workers"]) >= 1
            body = {"prompt": "What is prefill?", "max_tokens": 8, "ignore_eos": True}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 401
            headers = {"Authorization": f"Bearer {API_KEY}"}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 8
            worker = next(pod for pod in pods(LOCAL) if pod.component == "worker")
            hook = worker.container["lifecycle"]["preStop"]["exec"]["command"]
            before = {w["worker_id"] for w in cluster.status()["workers"]}
            run = diptych(elsewhere, *hook[1:], env=joined)
            assert run.returncode == 0, run.stderr
            assert not before & {w["worker_id"] for w in cluster.status()["workers"]}
            # Here all pods are on one machine: none is left meanwhile.
            wait_until(lambda: cluster.status()["state"] == "ready", READY_S)
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 8
            assert cluster.end(signal.SIGTERM) == 0
            with serving(tmp_path / "again", "--config", str(config), env=joined):
                assert process.wait(END_S) == 3, "its pod starts it again, with the new token"
