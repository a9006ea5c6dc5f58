"""Renders the chart to base/ and overlays/, and completes its values' schema: `python deploy/kubernetes/render.py`.

    chart/ with the default values    -> base/manifests.yaml
    each file of chart/settings/      -> overlays/NAME/: what differs from the base, as patches and added objects
    ClusterConfig                     -> the `$defs` of chart/values.schema.json

A test compares all of it with what is checked in.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import helm_python
import yaml

from diptych.cluster.common.config import ClusterConfig

FOLDER = Path(__file__).parent
CHART = FOLDER / "chart"
SCHEMA = CHART / "values.schema.json"
SETTINGS = sorted((CHART / "settings").glob("*.yaml"))
NAME = "diptych"  # of the release, and of the namespace
HEADER = "# Rendered by render.py from ../chart{}: change that, and render again.\n"
BYTES = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^[0-9.]+ ?([KMGT]i?B|B)?$"}]}
# Settings that are the chart's own, or secrets, which stand in a Secret and never in values.
CHARTS_OWN = {
    "ClusterConfig": {"drain_timeout_s"},
    "PoolConfig": {"label_selector"},
    "RouterConfig": {
        *("replicas", "host", "http_port", "grpc_port", "num_cpus", "resources", "label_selector"),
        *("api_key", "metrics_key", "api_keys_file", "http_tls", "grpc_tls"),
    },
}
LINK_TLS = {"enum": ["off", "auto", False]}  # YAML reads `off` as a boolean; files are a Secret's

Manifest = dict[str, Any]
Files = dict[Path, str]


def render(values: Mapping[str, Any]) -> list[str]:
    """Documents that `helm template` prints for the values, in the order of the chart's files. Raises HelmError."""
    with helm_python.Chart.load(str(CHART)) as chart:
        texts: Mapping[str, str] = chart.render(dict(values), name=NAME, namespace=NAME)
    documents = [text for name in sorted(texts) if name.endswith(".yaml") for text in texts[name].split("\n---\n")]
    return [text.strip() + "\n" for text in documents if yaml.safe_load(text) is not None]


def objects(values: Mapping[str, Any]) -> list[Manifest]:
    return [yaml.safe_load(text) for text in render(values)]


def read_settings(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def files() -> Files:
    """Text of every file that is rendered by Helm, by path."""
    base = render({})
    made = {FOLDER / "base" / "manifests.yaml": HEADER.format("") + "---\n".join(base)}
    for path in SETTINGS:
        made |= _overlay(path, [yaml.safe_load(text) for text in base])
    return made


def values_schema() -> str:
    """Closed schema of the values, by which Helm checks them: written by hand but for Diptych's own settings, which the
    code has."""
    schema = json.loads(SCHEMA.read_text())
    found = ClusterConfig.model_json_schema()
    definitions = {**found.pop("$defs"), "ClusterConfig": found}
    found["properties"]["tls"] = LINK_TLS
    plain = {name: _plain(definitions[name], CHARTS_OWN.get(name, set())) for name in sorted(definitions)}
    used = json.dumps([schema["properties"], plain])
    schema["$defs"] = {name: each for name, each in plain.items() if f'"#/$defs/{name}"' in used}
    return json.dumps(schema, indent=1) + "\n"


def _plain(schema: Any, without: set[str], key: str = "") -> Any:
    """The schema without words for people, and without some properties; sizes may have a unit."""
    if isinstance(schema, list):
        return [_plain(each, without) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if key == "properties":
        kept = {name: each for name, each in schema.items() if name not in without}
        return {name: BYTES if name.endswith("_bytes") else _plain(each, without) for name, each in kept.items()}
    words = {"title", "default"} | ({"description"} if isinstance(schema.get("description"), str) else set())
    return {name: _plain(each, without, name) for name, each in schema.items() if name not in words}


def _overlay(settings: Path, base: list[Manifest]) -> Files:
    wanted = objects(read_settings(settings))
    before = {_identity(each): each for each in base}
    after = {_identity(each): each for each in wanted}
    patches = [_patch(key, list(difference(before[key], after[key]))) for key in before if key in after]
    patches += [_deletion(before[key]) for key in before if key not in after]
    added = [after[key] for key in after if key not in before]
    folder, header = FOLDER / "overlays" / settings.stem, HEADER.format(f"/settings/{settings.name}")
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAME,
        "resources": ["../../base", *(["added.yaml"] if added else [])],
        "patches": [patch for patch in patches if patch],
    }
    about = "".join(takewhile(lambda line: line.startswith("#"), settings.read_text().splitlines(keepends=True)))
    made = {folder / "kustomization.yaml": f"{header}#\n{about}{_dump(kustomization)}"}
    if added:
        made[folder / "added.yaml"] = header + "---\n".join(_dump(each) for each in added)
    return made


def _identity(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _patch(key: tuple[str, str], operations: list[Manifest]) -> Manifest | None:
    kind, name = key
    return {"target": {"kind": kind, "name": name}, "patch": _dump(operations)} if operations else None


def _deletion(manifest: Manifest) -> Manifest:
    what = {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"]}
    return {"patch": _dump({"$patch": "delete", **what, "metadata": {"name": manifest["metadata"]["name"]}})}


def difference(before: Any, after: Any, path: str = "") -> Iterator[Manifest]:
    """Operations (RFC 6902) that make `after` of `before`. Lists of another length are replaced whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from _of_key(before, after, key, f"{path}/{key.replace('~', '~0').replace('/', '~1')}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from difference(old, new, f"{path}/{i}")
    elif before != after:
        yield {"op": "replace", "path": path, "value": after}


def _of_key(before: Manifest, after: Manifest, key: str, path: str) -> Iterator[Manifest]:
    if key not in after:
        yield {"op": "remove", "path": path}
    elif key not in before:
        yield {"op": "add", "path": path, "value": after[key]}
    else:
        yield from difference(before[key], after[key], path)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeats what occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _dump(data: Any) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120)


def main() -> None:
    SCHEMA.write_text(values_schema())
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
