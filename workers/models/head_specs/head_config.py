"""Finds out which head a folder holds, and what that needs of its target and of the KV pool. Reads no weight; no torch.

A folder whose config.json names an EAGLE-3 architecture holds such a head; one of another architecture holds an MTP
module, perhaps beside the whole target.
"""

from pathlib import Path
from typing import Any, cast

from ...common.errors import CheckpointError, ConfigError, UnsupportedArchitecture
from ..families.json_config import JsonFields, read_json_object
from ..families.spec import ModelSpec
from .eagle3_config import Eagle3Config, read_eagle3
from .head_spec import HeadSpec
from .mtp_config import MtpConfig, read_mtp


def read_head_spec(folder: Path, target: ModelSpec, method: str | None = None) -> HeadSpec:
    """Read what the config.json of the head in `folder` says. Raises CheckpointError, UnsupportedArchitecture, and
    ConfigError for a head of another target, or of another kind than `method`."""
    spec = read_head(folder, target).head
    if method not in (None, spec.method):
        raise ConfigError(f"{folder} holds a head of the kind {spec.method}: set speculation to {spec.method}")
    return spec


def read_head(folder: Path, target: ModelSpec) -> Eagle3Config | MtpConfig:
    """Raises what `read_head_spec` raises."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no config.json: give the folder of a draft head")
    config = JsonFields(path, read_json_object(path))
    if "speculators_model_type" not in config:
        return read_eagle3(config, target) if _names_eagle(config) else read_mtp(config, target)
    match config.get("speculators_model_type"):
        case "eagle3":
            return read_eagle3(config, target)
        case "mtp":
            return read_mtp(config, target)
        case other:
            raise UnsupportedArchitecture(
                f"{path}: speculators_model_type {other!r} is not supported; it must be eagle3 or mtp"
            )


def _names_eagle(config: JsonFields) -> bool:
    names: Any = config.get("architectures")
    return isinstance(names, list) and any("eagle" in str(name).lower() for name in cast("list[Any]", names))
