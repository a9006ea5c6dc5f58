"""YAML and flags -> ClusterConfig, and what is wrong with them in words that name the key and the line."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ...workers.common.errors import ConfigError
from ...workers.common.settings import describe
from .config import ClusterConfig

KEY_VARIABLES = {"api_key": "DIPTYCH_API_KEY", "metrics_key": "DIPTYCH_METRICS_KEY"}  # of router
_REMEDIES = {
    "model": ". Give the folder of a Hugging Face checkpoint, as in `diptych serve /models/llama`, or `diptych serve "
    "tiny` for the model that ships with Diptych"
}

Loc = tuple[int | str, ...]


def load(
    path: Path | None,
    flags: Mapping[str, Any],
    replicas: Mapping[str, int | None] | None = None,
    every_pool: Mapping[str, Any] | None = None,
) -> ClusterConfig:
    """The file's settings with `flags` (nested like the file; None: not given) over them. `replicas` by pool and what
    `every_pool` shares are flags too. Raises ConfigError."""
    settings, lines = read_yaml(path) if path else ({}, {})
    given = {pool: number for pool, number in (replicas or {}).items() if number is not None}
    if path is None and not given.get("mixed"):
        given = {"prefill": 1, "decode": 1, **given}
    pools = {pool: {"replicas": number} for pool, number in given.items()}
    settings = merge(merge(settings, flags), {"pools": pools})
    # A pool without a section stays empty, so only named pools may take the shared flags.
    named = settings.get("pools")
    if isinstance(named, Mapping):
        settings = merge(settings, {"pools": {pool: every_pool or {} for pool in named}})
    return build(settings, lines, str(path) if path else None)


def build(
    settings: Mapping[str, Any], lines: Mapping[Loc, int] | None = None, source: str | None = None
) -> ClusterConfig:
    try:
        return ClusterConfig.model_validate(dict(settings))
    except ValidationError as e:
        raise ConfigError(_explain(e, lines or {}, source)) from e


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; mappings are merged key by key, None means not given."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping):
            if given := merge(below if isinstance(below, Mapping) else {}, value):
                merged[key] = given
        elif value is not None:
            merged[key] = value
    return merged


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[Loc, int]]:
    """The file's mapping, and the line (from 1) of each key by its path. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}. Check the path given to --config") from e
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path, *, is_secret: bool = False) -> tuple[dict[str, Any], dict[Loc, int]]:
    """Read the text of such a file. Of a secret one errors show no part. Raises ConfigError."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        settings = yaml.safe_load(text)
    except yaml.YAMLError as e:
        if is_secret:
            mark = e.problem_mark if isinstance(e, yaml.MarkedYAMLError) else None
            raise ConfigError(f"{path} is not valid YAML{f': see line {mark.line + 1}' if mark else ''}") from None
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from e
    except (ValueError, RecursionError) as e:  # a date that does not exist, a number of 5,000 digits, deep nesting
        reason = "a date or a number in it is impossible: put text that looks like one in quotes"
        if isinstance(e, RecursionError):
            reason = "it is nested too deep: check its brackets and indentation"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    if settings is None or node is None:
        return {}, {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a mapping (key: value), not a {type(settings).__name__}")
    lines: dict[Loc, int] = {}
    try:
        _collect_lines(node, (), lines, path)
    except RecursionError:
        raise ConfigError(f"{path}: a mapping contains itself: remove the alias (*name) inside its anchor") from None
    return settings, lines


def _collect_lines(node: yaml.Node, loc: Loc, lines: dict[Loc, int], path: Path) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        here = (*loc, str(key.value))
        line = key.start_mark.line + 1
        if here in lines:
            raise ConfigError(f"{path} line {line}: {_dotted(here)} is given twice (first on line {lines[here]})")
        lines[here] = line
        _collect_lines(value, here, lines, path)


def _explain(error: ValidationError, lines: Mapping[Loc, int], source: str | None) -> str:
    # A union reports one error per member: the first is enough.
    seen: dict[Loc, str] = {}
    for problem in error.errors(include_url=False):
        loc = _known_part(problem["loc"])
        seen.setdefault(loc, _sentence(loc, problem))
    parts: list[str] = []
    for loc, sentence in seen.items():
        line = next((lines[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in lines), None)
        where = f"{source} line {line}: " if source and line else ""
        parts.append(where + sentence)
    return "; ".join(parts)


def _known_part(loc: Loc) -> Loc:
    """`loc` without the names of union arms that pydantic appends to it."""
    model: type[BaseModel] = ClusterConfig
    is_name = False  # of one of several settings of a kind, as a tier's
    for depth, key in enumerate(loc):
        if is_name:
            is_name = False
            continue
        if key == "[key]":  # the name itself is wrong
            return loc[:depth]
        field = model.model_fields.get(str(key))
        inner = _model_of(field.annotation) if field else None
        if inner is None:
            # A mapping's own keys (a resource's name) belong to the path, the arms of a type do not.
            return loc[: depth + 2] if _is_mapping(field) else loc[: depth + 1]
        model, is_name = inner, _is_mapping(field)
    return loc


def _sentence(loc: Loc, problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        known = _keys_at(loc[:-1])
        close = get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known keys: {', '.join(known)}"
        return f"{_dotted(loc)}: unknown key. {hint}"
    if problem["type"] == "missing":
        return f"{_dotted(loc)} is missing{_REMEDIES.get(_dotted(loc), '')}"
    message = problem["msg"].removeprefix("Value error, ")
    if loc and (variable := KEY_VARIABLES.get(str(loc[-1]))):
        # A key must not be shown on a terminal; whoever set it in the environment finds it there.
        is_from_there = problem["input"] is not None and problem["input"] == os.environ.get(variable)
        return f"{variable if is_from_there else _dotted(loc)}: {message}"
    return f"{_dotted(loc)}: {describe(problem)}" if loc else describe(problem)


def _keys_at(loc: Loc) -> list[str]:
    model: type[BaseModel] | None = ClusterConfig
    is_name = False
    for key in loc:
        assert model is not None
        if is_name:
            is_name = False
            continue
        field = model.model_fields[str(key)]
        model, is_name = _model_of(field.annotation), _is_mapping(field)
    return list(model.model_fields) if model else []


def _is_mapping(field: FieldInfo | None) -> bool:
    return field is not None and get_origin(field.annotation) is dict


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _dotted(loc: Loc) -> str:
    return ".".join(str(part) for part in loc)
