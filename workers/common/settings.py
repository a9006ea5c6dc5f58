"""Field types, rules and errors of settings, for workers and the cluster alike. No torch, no Ray.

A setting is one field of a settings class: its type, default, bounds and help. Flags, YAML keys and the settings of a
pool are generated from the fields. A rule on several fields raises SettingError, on the class that owns them.
"""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from .errors import ConfigError

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class Scope(Enum):
    """Level of cluster.yaml at which a worker's setting may be given. A field without one is a pool's."""

    POOL = "pool"
    CLUSTER = "cluster"  # the same for all workers
    BOTH = "both"  # for the cluster, and for a pool that differs
    PROCESS = "process"  # not there: the cluster sets it for each process


class SettingError(ValueError):
    """A setting that does not fit the others. `text` follows its name: "must be ..."."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name} {text}")
        self.name = name
        self.text = text


def parse_bytes(value: object) -> object:
    """'2GiB' -> 2147483648. Any value but a text is returned unchanged, for pydantic to check."""
    if not isinstance(value, str):
        return value
    digits = value.strip().rstrip("KMGTIiBbkmgt ")
    unit = value.strip()[len(digits) :].strip().upper()
    try:
        return int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError) as e:
        raise ValueError(f"{value!r} is not a size: write bytes, or a number with MiB, GiB, MB or GB") from e


NumBytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
NumRanks = Annotated[int, Field(ge=1, le=64)]
HostAndPort = Annotated[str, Field(pattern=r"^(\[[^\s\[\]]+\]|[^\s:\[\]]+):[0-9]{1,5}$")]
Port = Annotated[int, Field(ge=0, le=65535)]


def describe(problem: Mapping[str, Any]) -> str:
    """Describe an error of pydantic's: what is wrong with a value."""
    message = problem["msg"].removeprefix("Value error, ")
    return message if problem["type"] == "value_error" else f"{message}, got {problem['input']!r}"


def read_secret(path: Path, flag: str, what: str) -> str:
    """The text of a file without surrounding space. Flags name the file, for other users can read a process's
    flags. `flag` and `what` it holds are for the error. Raises ConfigError."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{flag}: cannot read {path} ({e}): check the path") from e
    if not secret:
        raise ConfigError(f"{flag}: {path} is empty: write the {what} into it")
    return secret
