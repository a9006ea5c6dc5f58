"""Schemas of custom resources, from the projects that publish them (crds/*.json, each with its origin).

What was left out of them: descriptions, rules in CEL, `status`, and the schemas of pods, in whose place stands
`x-pod-template` or `x-pod-spec`: those are Kubernetes' own, by which the tests check pods."""

import json
from pathlib import Path
from typing import Any

import jsonschema

FOLDER = Path(__file__).with_name("crds")
FREE = ("x-kubernetes-preserve-unknown-fields", "x-pod-template", "x-pod-spec")
SCHEMAS: dict[tuple[str, str], Any] = {
    (found["apiVersion"], found["kind"]): found["schema"]
    for found in (json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json")))
}


def closed(schema: Any) -> Any:
    """The schema with every object of known properties closed: Kubernetes would drop an unknown field silently."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(each) for key, each in schema.items()}
    if isinstance(schema.get("properties"), dict) and not any(schema.get(key) for key in FREE):
        made.setdefault("additionalProperties", False)
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
    return made


def is_custom(manifest: dict[str, Any]) -> bool:
    return (manifest["apiVersion"], manifest["kind"]) in SCHEMAS


def check(manifest: dict[str, Any]) -> None:
    """Raise ValidationError unless the resource fits its closed schema."""
    schema = closed(SCHEMAS[manifest["apiVersion"], manifest["kind"]])
    jsonschema.Draft202012Validator(schema).validate(manifest)
