"""Subset of kustomize that deploy/kubernetes uses: resources, namespace, generated ConfigMaps, JSON patches by target.
It refuses what it does not know. (Hashes in generated names are left out.)"""

import copy
from pathlib import Path
from typing import Any

import yaml

KEYS = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "patches"}
CLUSTER_WIDE = {"Namespace"}

Manifest = dict[str, Any]


def build(folder: Path) -> list[Manifest]:
    """The objects that `kubectl kustomize folder` prints."""
    settings = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert settings["kind"] == "Kustomization"
    assert set(settings) <= KEYS, f"{folder}: unknown {set(settings) - KEYS}"
    objects: list[Manifest] = []
    for name in settings.get("resources", []):
        path = folder / name
        objects += build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for generator in settings.get("configMapGenerator", []):
        _generate(objects, folder, generator)
    for patch in settings.get("patches", []):
        target = patch["target"]
        [found] = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (target["kind"], target["name"])]
        for operation in yaml.safe_load((folder / patch["path"]).read_text()):
            _apply(found, **operation)
    for each in objects:
        if each["kind"] not in CLUSTER_WIDE:
            each["metadata"]["namespace"] = settings["namespace"]
    return objects


def _generate(objects: list[Manifest], folder: Path, generator: dict[str, Any]) -> None:
    name, behavior = generator["name"], generator.get("behavior", "create")
    old = [o for o in objects if (o["kind"], o["metadata"]["name"]) == ("ConfigMap", name)]
    assert len(old) == {"create": 0, "replace": 1}[behavior], f"{folder}: {behavior} {name}"
    for each in old:
        objects.remove(each)
    data = {file: (folder / file).read_text() for file in generator["files"]}
    objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data})


def _apply(target: Any, op: str, path: str, value: Any) -> None:
    """RFC 6902: test, add (to a mapping) and replace."""
    *way, last = (part.replace("~1", "/").replace("~0", "~") for part in path.removeprefix("/").split("/"))
    for part in way:
        target = target[int(part) if isinstance(target, list) else part]
    key = int(last) if isinstance(target, list) else last
    match op:
        case "test":
            assert target[key] == value, f"{path} is {target[key]!r}, not {value!r}"
        case "replace":
            assert target[key] != value, f"{path} is {value!r} already"
            target[key] = copy.deepcopy(value)
        case _:
            assert (op, type(target)) == ("add", dict), f"{op} {path}"
            target[key] = copy.deepcopy(value)
