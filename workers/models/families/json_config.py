"""Checked reading of JSON that others wrote: a checkpoint's config.json and index. Knows no tensor."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ...common.errors import CheckpointError

MAX_DIMENSION = 1 << 24  # no size in a real checkpoint is larger; a larger one is a damaged file


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read ({e.strerror}): check the file's permissions") from e
    except ValueError as e:
        raise CheckpointError(f"{path} is not valid JSON ({e}): fetch the checkpoint again") from e
    except RecursionError as e:
        raise CheckpointError(f"{path} is nested too deeply to be a checkpoint's: fetch the checkpoint again") from e
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, found {type(value).__name__}: fetch the checkpoint again"
        )
    return cast("dict[str, Any]", value)


class JsonFields:
    """Checked access to the fields of one JSON object; null counts as absent. Errors name the file and the field."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self._values, self._prefix = path, values, prefix

    def error(self, name: str, need: str, found: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._prefix}{name} {need}, found {found!r}")

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def values(self) -> Mapping[str, Any]:
        return self._values

    def with_values(self, values: Mapping[str, Any]) -> "JsonFields":
        """Return the same, with `values` instead of its own where both name a field."""
        return JsonFields(self.path, {**self._values, **values}, self._prefix)

    def with_defaults(self, values: Mapping[str, Any]) -> "JsonFields":
        """Return the same, with `values` of fields that are not named at all; null stays."""
        return JsonFields(self.path, {**values, **self._values}, self._prefix)

    def size(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """A count or size of at least `minimum`."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_DIMENSION:
            raise self.error(name, f"must be an integer in [{minimum}, {MAX_DIMENSION}]", value)
        return value

    def number(self, name: str, default: float | None = None, minimum: float = -math.inf) -> float:
        """A finite number above `minimum`."""
        value = self._present(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max or value <= minimum:  # a whole one may be beyond
            bound = "" if minimum == -math.inf else f" above {minimum:g}"
            raise self.error(name, f"must be a finite number{bound}", value)
        return float(value)

    def optional_number(self, name: str, minimum: float = -math.inf) -> float | None:
        return None if self.get(name) is None else self.number(name, minimum=minimum)

    def numbers(self, name: str, minimum: float = -math.inf) -> tuple[float, ...]:
        """A list of finite numbers above `minimum`."""
        values = self._present(name, None)
        if not isinstance(values, list):
            raise self.error(name, "must be a list of numbers", values)
        named = {f"{name}[{i}]": value for i, value in enumerate(cast("list[Any]", values))}
        fields = JsonFields(self.path, named, self._prefix)
        return tuple(fields.number(at, minimum=minimum) for at in named)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false", value)
        return value

    def section(self, name: str) -> "JsonFields | None":
        """The object under `name`; None where it is absent, null or empty."""
        value = self.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "must be an object", value)
        return JsonFields(self.path, cast("dict[str, Any]", value), f"{self._prefix}{name}.")

    def _present(self, name: str, default: object) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path}: {self._prefix}{name} is missing")
        return value
