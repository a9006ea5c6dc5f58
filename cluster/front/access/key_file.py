"""File of API keys with names: YAML or JSON, a mapping of each name to its key.

    alice: sk-alice-0123456789                     # the key itself
    bob:
      sha256: 2bb80d53...                          # or the SHA-256 of the key, in hexadecimal
      service_tier: flex                           # the tier of all its requests
      limits: {requests_per_minute: 60, concurrent_requests: 8, tokens_per_minute: 100000}

Errors name lines and fields, never a key.
"""

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ....workers.common.errors import ConfigError
from ...common.config import TierName
from ...common.config_file import parse_yaml

DEFAULT_NAME = "default"  # of the single key, `router.api_key`
MAX_KEYS = 1024
MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOBODY_ELSE = stat.S_IWGRP | stat.S_IRWXO  # may do this


_SETTINGS = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)
Most = Annotated[int, Field(ge=1, le=10**12)]


class KeyLimits(BaseModel):
    """Limits over all routers. None: none."""

    model_config = _SETTINGS

    requests_per_minute: Most | None = None
    concurrent_requests: Most | None = None
    tokens_per_minute: Most | None = None  # of prompts and answers


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class NamedKey:
    name: str
    sha256: bytes  # of the key
    service_tier: str | None = None  # the only tier of its requests; None: the client chooses
    limits: KeyLimits = NO_LIMITS


class _Entry(BaseModel):
    model_config = _SETTINGS

    key: Annotated[str, Field(min_length=8)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    service_tier: TierName | None = None
    limits: KeyLimits = NO_LIMITS

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        return self

    def named(self, name: str) -> NamedKey:
        digest = bytes.fromhex(self.sha256) if self.sha256 else digest_of((self.key or "").encode())
        return NamedKey(name, digest, self.service_tier, self.limits)


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class KeyFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: bytes | None = None  # content that was parsed last

    def load(self) -> tuple[NamedKey, ...] | None:
        """Keys of the file; None: it has not changed since the last call. Raises ConfigError."""
        content = _read_owned(self.path)
        if content == self._read:
            return None
        keys = parse(content, self.path)
        self._read = content
        return keys


def parse(content: bytes, path: Path) -> tuple[NamedKey, ...]:
    """Raises ConfigError."""
    try:
        entries, lines = parse_yaml(content.decode(), path, is_secret=True)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} cannot be read as YAML: write names and keys as text, in quotes") from None
    if not 0 < len(entries) <= MAX_KEYS:
        raise ConfigError(f"{path} has {len(entries)} keys: it must have 1 to {MAX_KEYS}")
    found: dict[bytes, NamedKey] = {}
    for name, entry in entries.items():
        line = f"{path} line {lines.get((name,), 1)}"
        if not _NAME.fullmatch(str(name)) or name == DEFAULT_NAME:
            raise ConfigError(
                f"{line}: a name has 1 to 64 letters, digits, '.', '_' and '-', begins with a letter or a digit, and "
                f"is not {DEFAULT_NAME!r}, which is router.api_key"
            )
        key = _entry(entry, f"{line}, {name}").named(str(name))
        if other := found.get(key.sha256):
            raise ConfigError(f"{line}: {name} has the same key as {other.name}: give each its own")
        found[key.sha256] = key
    return tuple(found.values())


def _entry(value: object, where: str) -> _Entry:
    try:
        return _Entry.model_validate(value if isinstance(value, Mapping) else {"key": value})
    except ValidationError as e:
        problem = e.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}{f': {field}' if field else ''}: {message}") from None  # its input may be a key


def _read_owned(path: Path) -> bytes:
    """Content of a file that only its owner, or a group of this process, can read. Raises ConfigError."""
    try:
        with open(path, "rb", opener=_open) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError(f"{path} is not a regular file: give the path of a file of keys")
            if not _is_guarded(about):
                raise ConfigError(
                    f"{path} holds keys, and other users can open it: run `chmod 600 {path}`. A group may read it that "
                    "this process is in, where root or this process's user owns the file, as Kubernetes' fsGroup does"
                )
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}. Check router.api_keys_file") from e
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes: is it the file of keys?")
    return content


def _is_guarded(about: os.stat_result) -> bool:
    if about.st_mode & _NOBODY_ELSE:
        return False
    if not about.st_mode & stat.S_IRWXG:
        return True
    return about.st_uid in (0, os.geteuid()) and about.st_gid in (os.getegid(), *os.getgroups())


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
