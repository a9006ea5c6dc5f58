"""Checked access to the metadata of a GGUF model's architecture, by llama.cpp's keys. Errors name file and key."""

import math
from typing import Any, NoReturn, cast

import numpy as np

from ...common.errors import CheckpointError
from .gguf_files import GgufModel

MAX_SIZE = 1 << 24  # no size in a real model is larger


class GgufFields:
    """Metadata below the name of an architecture: `{architecture}.{key}`."""

    def __init__(self, model: GgufModel, architecture: str) -> None:
        self.model, self._prefix = model, f"{architecture}."

    def fail(self, key: str, why: str, found: object) -> NoReturn:
        raise CheckpointError(f"{self.model.path}: metadata {self._prefix}{key} {why}, found {found!r}")

    def get(self, key: str) -> Any:
        return self.model.metadata.get(self._prefix + key)

    def size(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number; of a list, which has one for each layer, the one that all layers share."""
        value = self._present(key, default)
        if isinstance(value, list):
            each: set[Any] = set(cast("list[Any]", value))
            if len(each) != 1:
                self.fail(key, "must be the same for all layers", value[:8])
            value = each.pop()
        if type(value) is not int or not minimum <= value <= MAX_SIZE:
            self.fail(key, f"must be a whole number in [{minimum}, {MAX_SIZE}]", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number: of float32, the shortest decimal that it stands for, as a config.json has it."""
        value = self._present(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            self.fail(key, "must be a finite number", value)
        return float(str(np.float32(value))) if np.float32(value) == value else float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            self.fail(key, "must be true or false", value)
        return value

    def text(self, key: str, default: str) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            self.fail(key, "must be a text", value)
        return value

    def has_tensor(self, name: str) -> bool:
        return name in self.model.tensors

    def _present(self, key: str, default: object) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.model.path}: metadata {self._prefix}{key} is missing: fetch the file again")
        return value
