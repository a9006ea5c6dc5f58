"""Fields of quantisation configs, read checked: values from a list, sizes of groups and blocks, patterns of names. No
torch."""

import time
from typing import Any, cast

import regex

from .json_config import JsonFields

MAX_PATTERN_S = 5.0  # that one pattern may take for all names of a model: one that is not hostile takes milliseconds
MAX_PATTERNS = 1 << 16  # names and patterns of one list: a model's modules, at most


class NamePattern:
    """Name of a module, or "re:" and a regular expression that names begin with.

    What strangers wrote may take longer than anyone waits: so matching has a limit, over all names.
    """

    def __init__(self, fields: JsonFields, name: str, text: str) -> None:
        """Raises CheckpointError for what is no regular expression."""
        self.text = text
        self._fields, self._name, self._left_s = fields, name, MAX_PATTERN_S
        try:
            self._pattern = regex.compile(text[3:]) if text.startswith("re:") else None
        except (regex.error, RecursionError) as e:
            raise fields.error(name, f"must hold regular expressions after re: ({e})", text) from e

    def __repr__(self) -> str:
        return repr(self.text)

    @property
    def is_exact(self) -> bool:
        return self._pattern is None

    def matches(self, module: str) -> bool:
        """Raises CheckpointError for a pattern that has taken too long."""
        if self._pattern is None:
            return self.text == module
        began = time.perf_counter()
        try:
            if self._left_s > 0:
                return self._pattern.match(module, timeout=self._left_s) is not None
        except TimeoutError:
            pass
        finally:
            self._left_s -= time.perf_counter() - began
        need = f"must take less than {MAX_PATTERN_S:g} s for all names: write it without repeats in repeats"
        raise self._fields.error(self._name, need, self.text)


def patterns_of(fields: JsonFields, name: str) -> tuple[NamePattern, ...]:
    """Names of modules and patterns of such. Raises CheckpointError."""
    found = texts(fields, name)
    if len(found) > MAX_PATTERNS:
        raise fields.error(name, f"must be at most {MAX_PATTERNS} names", len(found))
    return tuple(NamePattern(fields, name, text) for text in found)


def one_of(fields: JsonFields, name: str, known: tuple[str, ...], default: str | None = None) -> str:
    value = fields.get(name)
    value = default if value is None else value
    if value not in known:
        raise fields.error(name, f"must be one of {', '.join(known)}", value)
    return cast("str", value)


def texts(fields: JsonFields, name: str) -> tuple[str, ...]:
    """A list of texts; absent: an empty one."""
    values: Any = fields.get(name) or []
    if not isinstance(values, list) or not all(isinstance(v, str) for v in cast("list[Any]", values)):
        raise fields.error(name, "must be a list of texts", cast("object", values))
    return tuple(cast("list[str]", values))


def check_keys(fields: JsonFields, known: str) -> None:
    """known: names, by spaces. Raises CheckpointError for others, which may change what the tensors mean; null says
    nothing."""
    names = known.split()
    for name, value in fields.values.items():
        if value is not None and name not in names:
            need = (
                f"is not known here; known are {', '.join(names)}. If it does not change what the weights' "
                "tensors mean, take it out of the file"
            )
            raise fields.error(name, need, value)


def group_size_of(fields: JsonFields) -> int:
    """0 where all inputs of an output share its scale: absent, or -1."""
    return 0 if fields.get("group_size") in (None, -1) else fields.size("group_size")


def block_of(fields: JsonFields, name: str) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale; None: absent."""
    value: Any = fields.get(name)
    if value is None:
        return None
    sizes = cast("list[Any]", value) if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise fields.error(name, "must be two sizes", cast("object", value))
    return sizes[0], sizes[1]
