"""deploy/kubernetes: native objects by Kubernetes' schema, the RayCluster by KubeRay's rules and by cluster.yaml."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from diptych.cluster.common import config_file
from diptych.cluster.common.config import ClusterConfig, PoolConfig

from .kustomize import Manifest, build

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
LABEL = "diptych.io/pool"
TOKEN = {"name": "diptych-ray-token", "key": "auth_token"}
OVERLAYS = sorted(p.name for p in (FOLDER / "overlays").iterdir())


@pytest.fixture(params=["base", *(f"overlays/{name}" for name in OVERLAYS)])
def objects(request: pytest.FixtureRequest) -> list[Manifest]:
    return build(FOLDER / request.param)


@pytest.fixture
def ray_cluster(objects: list[Manifest]) -> Manifest:
    return one(objects, "RayCluster")


@pytest.fixture
def config(objects: list[Manifest], tmp_path: Path) -> ClusterConfig:
    """Load the config as the serving pod does: the file, and the API key from its environment."""
    path = tmp_path / "cluster.yaml"
    path.write_text(one(objects, "ConfigMap")["data"]["cluster.yaml"])
    return config_file.load(path, {"router": {"api_key": "from the Secret"}})


def one(objects: list[Manifest], kind: str) -> Manifest:
    [found] = [o for o in objects if o["kind"] == kind]
    return found


def groups(ray_cluster: Manifest) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in ray_cluster["spec"]["workerGroupSpecs"]}


def pod_templates(objects: list[Manifest]) -> Iterator[dict[str, Any]]:
    spec = one(objects, "RayCluster")["spec"]
    yield spec["headGroupSpec"]["template"]
    yield from (group["template"] for group in spec["workerGroupSpecs"])
    yield one(objects, "Deployment")["spec"]["template"]


def test_every_file_is_used() -> None:
    for path in FOLDER.rglob("kustomization.yaml"):
        settings = yaml.safe_load(path.read_text())
        used = {*settings["resources"], *(p["path"] for p in settings.get("patches", []))}
        used |= {file for generator in settings["configMapGenerator"] for file in generator["files"]}
        there = {p.name for p in path.parent.iterdir() if p.is_file()} - {path.name}
        assert {name for name in used if "/" not in name} == there


def test_native_objects_fit_the_schema(objects: list[Manifest]) -> None:
    for each in objects:
        if each["kind"] != "RayCluster":
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_the_pods_of_the_ray_cluster_fit_the_schema(objects: list[Manifest]) -> None:
    for template in pod_templates(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_the_ray_cluster_keeps_kuberays_rules(ray_cluster: Manifest) -> None:
    """Check those rules of its validation that its schema does not state."""
    spec = ray_cluster["spec"]
    assert set(spec) == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert len(groups(ray_cluster)) == len(spec["workerGroupSpecs"])
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert "labels" not in group["rayStartParams"], "KubeRay refuses them there: the group has a key of its own"
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert len(group["template"]["spec"]["containers"]) == 1, "the first one is Ray's"
    for group in spec["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_images_ray_is_the_manifests(ray_cluster: Manifest) -> None:
    version = ray_cluster["spec"]["rayVersion"]
    assert f"ARG RAY=ray[default]=={version}\n" in (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    assert f'"ray[default]=={version}"' in (ROOT / "deploy" / "ray" / "cluster.yaml").read_text()


def test_there_is_a_pod_for_every_worker_and_router(ray_cluster: Manifest, config: ClusterConfig) -> None:
    wanted = {name: pool for name, pool in config.pools.items() if pool.bounds[1]} | {"router": config.router}
    assert set(groups(ray_cluster)) == set(wanted)
    for name, group in groups(ray_cluster).items():
        settings = wanted[name]
        assert group["labels"] == settings.label_selector == {LABEL: name}
        assert group["replicas"] == settings.replicas
        [container] = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert float(limits["cpu"]) == settings.num_cpus
        num_gpus = config.gpus_of(settings) if isinstance(settings, PoolConfig) else 0
        assert float(limits.get("nvidia.com/gpu", 0)) == num_gpus


def test_gpus_are_asked_for_where_the_device_is_one(config: ClusterConfig) -> None:
    for _, pool in config.pools.items():
        assert not pool.replicas or (config.gpus_of(pool) > 0) == (config.device == "cuda")


def test_the_service_leads_to_the_routers(
    objects: list[Manifest], ray_cluster: Manifest, config: ClusterConfig
) -> None:
    service = one(objects, "Service")
    # Labels that KubeRay gives every pod.
    assert service["spec"]["selector"] == {
        "ray.io/cluster": ray_cluster["metadata"]["name"],
        "ray.io/group": "router",
    }
    [container] = groups(ray_cluster)["router"]["template"]["spec"]["containers"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    reached = {port["name"]: named[port["targetPort"]] for port in service["spec"]["ports"]}
    assert reached == {"http": config.router.http_port, "grpc": config.router.grpc_port}
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert config.router.host == "0.0.0.0"


def test_strangers_reach_the_clients_ports_and_no_other(objects: list[Manifest], ray_cluster: Manifest) -> None:
    inside, clients = [o["spec"] for o in objects if o["kind"] == "NetworkPolicy"]
    assert inside["podSelector"] == {}, "the namespace is Diptych's own: every pod in it is closed"
    [rule] = inside["ingress"]
    assert "ports" not in rule
    allowed = [source["podSelector"]["matchLabels"] for source in rule["from"]]
    serve_labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert allowed == [{"ray.io/cluster": ray_cluster["metadata"]["name"]}, serve_labels]
    service = one(objects, "Service")["spec"]
    assert clients["podSelector"]["matchLabels"] == service["selector"]
    [rule] = clients["ingress"]
    assert "from" not in rule
    assert {port["port"] for port in rule["ports"]} == {port["targetPort"] for port in service["ports"]}


def test_the_command_joins_that_ray_with_its_token(objects: list[Manifest], ray_cluster: Manifest) -> None:
    spec = ray_cluster["spec"]
    assert spec["authOptions"] == {"mode": "token", "secretName": TOKEN["name"]}
    deployment = one(objects, "Deployment")["spec"]
    [container] = deployment["template"]["spec"]["containers"]
    environment = {e["name"]: e.get("value") or e["valueFrom"]["secretKeyRef"] for e in container["env"]}
    assert environment == {
        "RAY_ADDRESS": f"{ray_cluster['metadata']['name']}-head-svc:6379",  # as KubeRay names the head's Service
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "DIPTYCH_API_KEY": {"name": "diptych-api-key", "key": "api_key"},
        "DIPTYCH_METRICS_KEY": {"name": "diptych-api-key", "key": "metrics_key", "optional": True},
    }
    readme = (FOLDER / "README.md").read_text()
    assert "secret generic diptych-ray-token --from-literal=auth_token=" in readme
    assert "secret generic diptych-api-key --from-literal=api_key=" in readme


def test_the_command_finds_its_settings_and_is_alone(objects: list[Manifest]) -> None:
    deployment = one(objects, "Deployment")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    assert "exec diptych serve --config /etc/diptych/cluster.yaml\n" in container["args"][0]
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes[mounts["/etc/diptych"]]["configMap"]["name"] == one(objects, "ConfigMap")["metadata"]["name"]


def test_every_pod_that_reads_the_model_has_it(objects: list[Manifest], config: ClusterConfig) -> None:
    head, *readers = pod_templates(objects)
    assert "volumes" not in head["spec"]
    for template in readers:
        [container] = template["spec"]["containers"]
        [models] = [v for v in template["spec"]["volumes"] if v["name"] == "models"]
        assert ("persistentVolumeClaim" in models) == config.model.startswith("/models/")
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
    claims = [o["metadata"]["name"] for o in objects if o["kind"] == "PersistentVolumeClaim"]
    assert claims in ([], ["diptych-models"])


def test_no_pod_has_a_token_of_kubernetes(objects: list[Manifest], ray_cluster: Manifest) -> None:
    """None calls its API: the only one that would is the sidecar of an autoscaler, which is off."""
    assert not ray_cluster["spec"].get("enableInTreeAutoscaling")
    for template in pod_templates(objects):
        assert template["spec"]["automountServiceAccountToken"] is False
        assert "serviceAccountName" not in template["spec"]


def test_no_pod_has_more_rights_than_it_needs(objects: list[Manifest]) -> None:
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    for template in pod_templates(objects):
        context = template["spec"]["securityContext"]
        assert context["runAsNonRoot"]
        assert f"USER {context['runAsUser']}\n" in dockerfile
        [container] = template["spec"]["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert set(container["resources"]["requests"]) >= {"cpu", "memory"}
        assert container["image"] == "diptych:latest"
