"""Objects of each installation of deploy/kubernetes that the tests look at, and the pods in them."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"

Manifest = dict[str, Any]


def _load(path: Path) -> ModuleType:
    """deploy/ is no part of the package, so its script is imported by path."""
    spec = importlib.util.spec_from_file_location("deploy_kubernetes_render", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


renderer: Any = _load(FOLDER / "render.py")
SETTINGS: dict[str, Path] = {path.stem: path for path in renderer.SETTINGS}
INSTALLATIONS = ["default", *SETTINGS]


@cache
def values(installation: str) -> dict[str, Any]:
    """Values that are given for it, beside the defaults."""
    return renderer.read_settings(SETTINGS[installation]) if installation in SETTINGS else {}


@cache
def _objects(installation: str) -> list[Manifest]:
    return renderer.objects(values(installation))


def objects(installation: str) -> list[Manifest]:
    """A new copy of its objects, as Helm renders them."""
    return [_copy(each) for each in _objects(installation)]


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def one(found: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    [it] = [o for o in found if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    return it


@dataclass(frozen=True)
class PodTemplate:
    """Pod that an object makes. `where`: the object, and which of its pods."""

    where: str
    template: Manifest

    @property
    def spec(self) -> Manifest:
        return self.template["spec"]

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def container(self) -> Manifest:
        [it] = self.spec["containers"]
        return it


def pods(found: list[Manifest]) -> Iterator[PodTemplate]:
    for each in found:
        spec, where = each.get("spec", {}), f"{each['kind']} {each['metadata']['name']}"
        match each["kind"]:
            case "Deployment":
                yield PodTemplate(where, spec["template"])
            case "RayCluster":
                yield PodTemplate(f"{where} head", spec["headGroupSpec"]["template"])
                for group in spec["workerGroupSpecs"]:
                    yield PodTemplate(f"{where} {group['groupName']}", group["template"])
            case "LeaderWorkerSet":
                yield PodTemplate(f"{where} leader", spec["leaderWorkerTemplate"]["leaderTemplate"])
                yield PodTemplate(f"{where} worker", spec["leaderWorkerTemplate"]["workerTemplate"])
            case _:
                pass
