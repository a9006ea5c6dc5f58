"""Finds out which head a folder holds, and loads it.

`read_head_spec` says what a head needs of its target and of the KV pool before any weight is read; `load_head` reads
the weights. A folder whose config.json names an EAGLE-3 architecture holds such a head; one of another architecture
holds an MTP module, perhaps beside the whole target.
"""

from pathlib import Path
from typing import Any, cast

import torch

from ...common.errors import CheckpointError, UnsupportedArchitecture
from ..families.json_config import JsonFields, read_json_object
from ..families.spec import ModelSpec
from .draft_head import DraftHead, SharedWeights
from .eagle3 import load_eagle3
from .eagle3_config import Eagle3Config, read_eagle3
from .head_spec import HeadSpec
from .mtp import load_mtp
from .mtp_config import MtpConfig, read_mtp


def read_head_spec(folder: Path, target: ModelSpec) -> HeadSpec:
    """Read what the config.json of the head in `folder` says. Raises CheckpointError, UnsupportedArchitecture, and
    ConfigError for a head of another target."""
    return _read(folder, target).head


def load_head(
    folder: Path,
    target: ModelSpec,
    shared: SharedWeights,
    dtype: torch.dtype,
    device: torch.device,
    first_kv_layer: int = 0,
) -> DraftHead:
    """Load the head in `folder`. shared: on `device`, of `dtype`. first_kv_layer: which layer of the cache is the
    head's first one. Raises what read_head_spec raises, and the same for tensors that are wrong or missing."""
    config = _read(folder, target)
    if isinstance(config, Eagle3Config):
        return load_eagle3(folder, config, shared, dtype, device, first_kv_layer)
    return load_mtp(folder, config, shared, dtype, device, first_kv_layer)


def _read(folder: Path, target: ModelSpec) -> Eagle3Config | MtpConfig:
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
