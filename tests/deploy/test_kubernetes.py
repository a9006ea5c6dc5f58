"""deploy/kubernetes: one chart, rendered by Helm; kustomize makes the same objects; all fit their schemas."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from . import crds
from .manifests import FOLDER, INSTALLATIONS, ROOT, SETTINGS, Manifest, objects, one, pods, renderer, values

KUBECTL = Path(sys.executable).with_name("kubectl")


@pytest.fixture(params=INSTALLATIONS)
def found(request: pytest.FixtureRequest) -> list[Manifest]:
    return objects(request.param)


def build(folder: Path) -> list[Manifest]:
    """Objects that kustomize makes of a folder."""
    command = [str(KUBECTL), "kustomize", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    return list(yaml.safe_load_all(run.stdout))


def test_what_is_checked_in_is_what_the_chart_renders() -> None:
    made: dict[Path, str] = renderer.files()
    assert renderer.SCHEMA.read_text() == renderer.values_schema(), "run deploy/kubernetes/render.py"
    for path, text in made.items():
        assert path.read_text() == text, f"run deploy/kubernetes/render.py: {path.relative_to(ROOT)} differs"
    there = {path for path in (FOLDER / "overlays").rglob("*") if path.is_file()}
    assert there == {path for path in made if "overlays" in path.parts}


@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_kustomize_makes_the_objects_that_helm_makes(installation: str) -> None:
    folder = FOLDER / ("base" if installation == "default" else f"overlays/{installation}")
    built = {(o["kind"], o["metadata"]["name"]): o for o in build(folder)}
    namespace = built.pop(("Namespace", "diptych"))
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    assert {o["metadata"].pop("namespace") for o in built.values()} == {"diptych"}
    wanted = {(o["kind"], o["metadata"]["name"]): o for o in objects(installation)}
    assert built == wanted


def test_native_objects_fit_the_schema(found: list[Manifest]) -> None:
    for each in found:
        if not crds.is_custom(each):
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_custom_resources_fit_their_closed_schemas(found: list[Manifest]) -> None:
    custom = [each for each in found if crds.is_custom(each)]
    assert {each["kind"] for each in custom} & {"RayCluster", "LeaderWorkerSet"}
    for each in custom:
        crds.check(each)


def test_the_schemas_are_closed_where_they_were_open() -> None:
    [cluster] = [o for o in objects("default") if o["kind"] == "RayCluster"]
    for change in ({"autoscalerOptions": {"idleTimeoutSecond": 1}}, {"workerGroups": []}, {"rayVersion": 2}):
        with pytest.raises(jsonschema.ValidationError):
            crds.check(cluster | {"spec": cluster["spec"] | change})


def test_pods_of_custom_resources_fit_kubernetes_schema(found: list[Manifest]) -> None:
    for pod in pods(found):
        each = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod.spec}
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        assert set(pod.template) == {"metadata", "spec"}
        assert set(pod.template["metadata"]) <= {"labels", "annotations"}


def test_ray_clusters_keep_kuberays_rules(found: list[Manifest]) -> None:
    """Check those rules of KubeRay's validation that its schema does not state."""
    for cluster in [o for o in found if o["kind"] == "RayCluster"]:
        spec = cluster["spec"]
        names = [group["groupName"] for group in spec["workerGroupSpecs"]]
        assert len(set(names)) == len(names)
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            assert "labels" not in group["rayStartParams"], "KubeRay refuses them there: the group has a key of its own"
            assert group["template"]["spec"]["restartPolicy"] == "Never", "autoscaler v2 asks for it"
            assert len(group["template"]["spec"]["containers"]) == 1, "the first one is Ray's"
        for group in spec["workerGroupSpecs"]:
            assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        if spec.get("enableInTreeAutoscaling"):
            assert spec["autoscalerOptions"]["version"] == "v2"


def test_helm_lints_the_chart() -> None:
    found = helm_python.lint(str(renderer.CHART))
    assert found["errors"] == []
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


def test_the_charts_versions_are_the_projects() -> None:
    chart = yaml.safe_load((renderer.CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{chart["appVersion"]}"\n' in project
    assert chart["version"] == chart["appVersion"]
    ray = yaml.safe_load((renderer.CHART / "values.yaml").read_text())["rayVersion"]
    assert f"ray[default]=={ray} " in (ROOT / "deploy" / "docker" / "image.in").read_text()
    assert f'"ray[default]=={ray}"' in (ROOT / "deploy" / "ray" / "cluster.yaml").read_text()


BAD_VALUES: dict[str, Any] = {
    "a key that is unknown": {"autoscale": True},
    "a key of a group that is unknown": {"groups": {"prefill": {"gpus": 1}}},
    "a setting of a pool that is unknown": {"cluster": {"pools": {"decode": {"replica": 2}}}},
    "a pool that is unknown": {"cluster": {"pools": {"decoder": {"replicas": 2}}}},
    "a secret": {"cluster": {"router": {"api_key": "the key of the clients"}}},
    "a setting that is the chart's": {"cluster": {"router": {"replicas": 3}}},
    "a file that no pod has": {"cluster": {"router": {"api_keys_file": "/etc/keys.yaml"}}},
    "certificates that no pod has": {"cluster": {"tls": {"ca": "/ca", "cert": "/cert", "key": "/key"}}},
    "a tag that changes": {"image": {"tag": "latest"}},
    "a digest that is none": {"image": {"digest": "sha256:abc"}},
    "a size without a unit": {"groups": {"prefill": {"memory": "32"}}},
    "a port for root": {"routers": {"httpPort": 80}},
    "a claim that is made without a name": {"models": {"create": True, "claim": ""}},
    "another kind": {"kind": "RayService"},
    "more routers than share a key's limits": {"routers": {"maxReplicas": 65}},
    "a pool of no group": {"cluster": {"pools": {"mixed": {"replicas": 1}}}},
    "a group of a pool that is not there": {"groups": {"decode": {"pools": ["decode", "mixed"]}}},
    "pickers of a gateway that is not there": {"gateways": {"enabled": True}},
    "a word about pickers that is unknown": {"gateway": {"fallback": 1}},
    "what to do without pickers": {"gateway": {"failureMode": "Open"}},
    "a priority that is no number": {"gateway": {"objectives": {"batch": "low"}}},
    "a name of a model that would end a word": {"gateway": {"modelRewrites": {"a": "b' c"}}},
    "routers with TLS of their own behind a gateway": {"gateway": {"enabled": True}, "secrets": {"clientsTls": "t"}},
    "a set of two groups": {"kind": "LeaderWorkerSet"},
}


@pytest.mark.parametrize("bad", BAD_VALUES)
def test_bad_values_are_refused(bad: str) -> None:
    with pytest.raises(helm_python.HelmError):
        renderer.render(BAD_VALUES[bad])


def test_tls_between_processes_needs_no_secret() -> None:
    [config] = [o for o in renderer.objects({"cluster": {"tls": "auto"}}) if o["kind"] == "ConfigMap"]
    assert yaml.safe_load(config["data"]["cluster.yaml"])["tls"] == "auto"


def test_an_image_may_be_named_by_its_digest() -> None:
    digest = "sha256:" + "0123456789abcdef" * 4
    made = renderer.objects({"image": {"repository": "registry.example/diptych", "digest": digest}})
    assert {pod.container["image"] for pod in pods(made)} == {f"registry.example/diptych@{digest}"}


@pytest.mark.parametrize("kind", ["RayCluster", "LeaderWorkerSet"])
def test_every_kind_of_pod_can_be_given_its_machines(kind: str) -> None:
    place = {"nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "a", "operator": "Exists"}]}
    place |= {"priorityClassName": "high"}
    given: dict[str, Any] = values("leader-worker-set" if kind == "LeaderWorkerSet" else "default")
    groups = given.get("groups", {"prefill": {}, "decode": {}})
    given = given | dict.fromkeys(("head", "serve", "routers"), place) | {"gateway": place | {"enabled": True}}
    given |= {"groups": {name: group if group is None else group | place for name, group in groups.items()}}
    made = list(pods(renderer.objects(given)))
    assert {pod.component for pod in made} >= {"head", "worker", "router", "picker"}
    for pod in made:
        assert {key: pod.spec.get(key) for key in place} == place, pod.where


def test_two_installations_share_a_namespace(found: list[Manifest]) -> None:
    """Every name and selector tells the release; only a claim may be shared."""
    with helm_python.Chart.load(str(renderer.CHART)) as chart:
        texts = chart.render({"models": {"create": True}}, name="other", namespace="diptych")
    other = [o for name in texts if name.endswith(".yaml") for o in yaml.safe_load_all(texts[name]) if o]
    shared = {(o["kind"], o["metadata"]["name"]) for o in found} & {(o["kind"], o["metadata"]["name"]) for o in other}
    assert shared <= {("PersistentVolumeClaim", "diptych-models")}
    assert "diptych" not in {pod.labels["app.kubernetes.io/instance"] for pod in pods(other)}
    text = yaml.safe_dump([o for o in other if o["kind"] != "PersistentVolumeClaim"])
    assert "instance: diptych" not in text and "name: diptych-" not in text.replace("claimName: diptych-models", "")


def test_patches_of_overlays_are_minimal() -> None:
    before: Manifest = {"a": [1, {"b/c": 2}], "d": 3, "e": [1]}
    after: Manifest = {"a": [1, {"b/c": 4}], "e": [1, 2], "f": 5}
    assert list(renderer.difference(copy.deepcopy(before), after)) == [
        {"op": "replace", "path": "/a/1/b~1c", "value": 4},
        {"op": "remove", "path": "/d"},
        {"op": "replace", "path": "/e", "value": [1, 2]},
        {"op": "add", "path": "/f", "value": 5},
    ]


def test_every_file_of_settings_says_what_it_is_for() -> None:
    readme = (FOLDER / "README.md").read_text()
    for name, path in SETTINGS.items():
        assert path.read_text().startswith("# ")
        assert f"chart/settings/{name}.yaml" in readme, name
        assert values(name)


def test_the_readme_makes_the_secrets_that_the_pods_read() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert "secret generic diptych-ray-token --from-literal=auth_token=" in readme
    assert "secret generic diptych-api-key --from-literal=api_key=" in readme
    assert "--from-literal=metrics_key=" in readme
    assert one(objects("gpu"), "ServiceMonitor")["spec"]["endpoints"][0]["authorization"]["credentials"] == {
        "name": "diptych-api-key",
        "key": "metrics_key",
    }
