"""Every command, flag, variable, path, port and setting that deploy/kubernetes names is there in the code."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.scripts.scripts
import typer

from diptych.cluster.cli.main import app
from diptych.cluster.common import config_file
from diptych.cluster.common.config import ClusterConfig, LinkTlsConfig
from diptych.cluster.front.http.operations import OPERATIONS
from diptych.cluster.front.readiness import PERIOD_S, TIMEOUT_S

from .manifests import FOLDER, INSTALLATIONS, ROOT, Manifest, PodTemplate, objects, one, pods, renderer
from .policy import RULES

IN_THE_IMAGE = {"tini", "bash", "sleep", "rm"}  # beside what the Dockerfile links: diptych, ray


@pytest.fixture(params=INSTALLATIONS)
def found(request: pytest.FixtureRequest) -> list[Manifest]:
    return objects(request.param)


def load(found: list[Manifest], folder: Path) -> ClusterConfig:
    """The config as the serving pod reads it: the file, and the API key from its environment."""
    path = folder / "cluster.yaml"
    path.write_text(one(found, "ConfigMap")["data"]["cluster.yaml"])
    return config_file.load(path, {"router": {"api_key": "from the Secret"}})


def lines(pod: PodTemplate) -> Iterator[list[str]]:
    """Words of each command that the pod runs, by itself or when it ends."""
    for script in pod.container.get("args", ()):
        for line in script.replace("\\\n", " ").splitlines():
            yield shlex.split(line.removeprefix("exec ").removesuffix(" || true"))
    if hook := pod.container.get("lifecycle"):
        yield hook["preStop"]["exec"]["command"]
    if command := pod.container.get("command"):
        yield command


def parse(words: list[str]) -> str:
    """Name of the command, whose flags are checked by what the command itself would say of them."""
    name, *rest = words
    if name in IN_THE_IMAGE:
        return name
    groups: dict[str, Any] = {"diptych": typer.main.get_command(app), "ray": ray.scripts.scripts.cli}
    groups[name].commands[rest[0]].make_context(rest[0], rest[1:])
    return f"{name} {rest[0]}"


def test_commands_take_their_flags(found: list[Manifest]) -> None:
    run = {parse(words) for pod in pods(found) for words in lines(pod)}
    assert run >= {"diptych serve", "diptych router", "diptych drain", "ray start", "tini", "sleep"}


@pytest.mark.parametrize("line", ["diptych drain --within 3", "diptych routers", "ray start --label=a=b"])
def test_flags_that_are_not_there_are_found(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such option|routers"):
        parse(shlex.split(line))


def test_ray_takes_the_start_parameters(found: list[Manifest]) -> None:
    for cluster in [o for o in found if o["kind"] == "RayCluster"]:
        for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
            flags = [f"--{key}={value}" for key, value in group["rayStartParams"].items()]
            assert parse(["ray", "start", *flags]) == "ray start"
            assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_variables_are_read(found: list[Manifest]) -> None:
    documented = (ROOT / "docs" / "configuration.md").read_text()
    for pod in pods(found):
        for variable in pod.container.get("env", ()):
            name = variable["name"]
            assert f"`{name}`" in documented, name
            if name.startswith("DIPTYCH_"):
                assert name in config_file.KEY_VARIABLES.values()
        script = "".join(pod.container.get("args", ()))
        used = set(re.findall(r"\$\{?([A-Z_]+)", script))
        assert used <= {variable["name"] for variable in pod.container.get("env", ())}


def test_probes_ask_what_is_served_without_a_key(found: list[Manifest]) -> None:
    is_open = {o.path for o in OPERATIONS.values() if o.method == "GET" and o.is_open}
    [router] = [pod for pod in pods(found) if pod.component == "router"]
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    asked = {kind: router.container[kind]["httpGet"]["path"] for kind in kinds}
    assert set(asked.values()) <= is_open
    assert asked["readinessProbe"] == "/health/decode", "makes a decode step"
    assert asked["livenessProbe"] == asked["startupProbe"] == "/version", "a router lives without workers"
    ready = router.container["readinessProbe"]
    assert ready["timeoutSeconds"] > TIMEOUT_S
    assert ready["periodSeconds"] <= PERIOD_S


def test_prometheus_reads_what_is_served() -> None:
    monitor = one(objects("gpu"), "ServiceMonitor")["spec"]
    [endpoint] = monitor["endpoints"]
    assert endpoint["path"] in {o.path for o in OPERATIONS.values() if o.method == "GET"}
    assert endpoint["port"] in {port["name"] for port in one(objects("gpu"), "Service")["spec"]["ports"]}
    assert endpoint["authorization"]["credentials"]["key"] == "metrics_key"


def test_settings_are_diptychs_and_ports_are_the_containers(found: list[Manifest], tmp_path: Path) -> None:
    config = load(found, tmp_path)
    [router] = [pod for pod in pods(found) if pod.component == "router"]
    named = {port["name"]: port["containerPort"] for port in router.container["ports"]}
    assert named == {"http": config.router.http_port, "grpc": config.router.grpc_port}
    service = one(found, "Service", "diptych")["spec"]
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == named
    assert config.router.host == "0.0.0.0"
    assert config.router.replicas == 0, "a Deployment runs them"


def test_the_config_is_where_the_command_reads_it(found: list[Manifest]) -> None:
    [serving] = [pod for pod in pods(found) if "diptych serve" in str(pod.container.get("args"))]
    mounts = {mount["mountPath"]: mount["name"] for mount in serving.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in serving.spec["volumes"]}
    assert volumes[mounts["/etc/diptych"]]["configMap"]["name"] == one(found, "ConfigMap")["metadata"]["name"]
    assert "--config /etc/diptych/cluster.yaml\n" in serving.container["args"][0]


def test_everyone_joins_the_ray_that_is_there_with_its_token(found: list[Manifest]) -> None:
    head = next(pod for pod in pods(found) if pod.component == "head")
    assert {"name": "gcs-server", "containerPort": 6379} in head.container["ports"]
    if any(o["kind"] == "RayCluster" for o in found):
        cluster = one(found, "RayCluster")
        assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "diptych-ray-token"}
        address = f"{cluster['metadata']['name']}-head-svc:6379"  # as KubeRay names the head's Service
    else:
        name = one(found, "LeaderWorkerSet")["metadata"]["name"]
        address = f"{name}-0.{name}:6379"  # the leader of the first group, in the set's headless Service
    for pod in pods(found):
        variables = {v["name"]: v.get("value") or v["valueFrom"] for v in pod.container.get("env", ())}
        if "ray start" in str(pod.container.get("args")):
            assert variables["RAY_AUTH_MODE"] == "token"
            key = {"name": "diptych-ray-token", "key": "auth_token"}
            assert variables["RAY_AUTH_TOKEN"] == {"secretKeyRef": key}
            assert variables["RAY_ADDRESS"] in (address, "127.0.0.1:6379")


def test_limits_of_keys_are_shared_by_the_most_routers(found: list[Manifest]) -> None:
    most = one(found, "HorizontalPodAutoscaler")["spec"]["maxReplicas"]
    [router] = [pod for pod in pods(found) if pod.component == "router"]
    assert f"diptych router --of {most} --drain " in router.container["args"][0]


def test_pods_may_write_where_they_must(found: list[Manifest]) -> None:
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    for pod in pods(found):
        mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for path in ("/tmp", "/home/diptych", "/dev/shm"):  # Ray's sessions; caches; Ray's object store
            assert "emptyDir" in volumes[mounts[path]], (pod.where, path)
        assert set(mounts.values()) == set(volumes), pod.where
        assert f"\nUSER {pod.spec['securityContext']['runAsUser']}\n" in dockerfile
    assert "--create-home --uid 10001 diptych" in dockerfile
    assert "/opt/diptych/bin/diptych /opt/diptych/bin/ray /usr/local/bin/" in dockerfile


def test_secrets_that_are_files_are_where_the_config_reads_them(tmp_path: Path) -> None:
    secrets = {"apiKeysFile": "keys-of-clients", "clientsTls": "for-clients", "clusterTls": "between-pods"}
    made = renderer.objects({"secrets": secrets, "serviceMonitor": {"enabled": True}})
    config = load(made, tmp_path)
    tls, router = config.tls, config.router
    assert isinstance(tls, LinkTlsConfig) and router.http_tls is not None and router.api_keys_file is not None
    assert router.grpc_tls == router.http_tls
    everywhere = {tls.ca: "between-pods", tls.cert: "between-pods", tls.key: "between-pods"}
    at_routers = dict.fromkeys((router.http_tls.cert, router.http_tls.key), "for-clients")
    at_routers |= {router.api_keys_file: "keys-of-clients"}
    for pod in pods(made):
        mounts = {Path(mount["mountPath"]): mount["name"] for mount in pod.container["volumeMounts"]}
        volumes = {volume["name"]: volume.get("secret", {}) for volume in pod.spec["volumes"]}
        for path, secret in (everywhere | (at_routers if pod.component == "router" else {})).items():
            assert volumes[mounts[Path(path).parent]] == {"secretName": secret, "defaultMode": 0o440}, pod.where
        found = {volume["secretName"] for volume in volumes.values() if volume}
        assert found == (set(secrets.values()) if pod.component == "router" else {"between-pods"}), pod.where
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert pod.component != "router" or pod.container[kind]["httpGet"]["scheme"] == "HTTPS"
    assert {Path(path).name for path in everywhere} == {"ca.crt", "tls.crt", "tls.key"}, "as cert-manager names them"
    assert one(made, "ServiceMonitor")["spec"]["endpoints"][0]["scheme"] == "https"
    assert [text for rule in RULES for text in rule(made)] == []


def test_never_two_commands_at_once() -> None:
    serve = one(objects("default"), "Deployment", "diptych-serve")["spec"]
    assert (serve["replicas"], serve["strategy"]) == (1, {"type": "Recreate"})


def test_the_readme_says_that_it_was_never_applied() -> None:
    assert "validated, never applied" in (FOLDER / "README.md").read_text()
