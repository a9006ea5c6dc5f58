"""Finds out which head a folder holds, and loads it.

read_head_spec says what a head needs of its target and of the KV pool before any weight is read; load_head reads it.
"""

from pathlib import Path

import torch

from ...common.errors import CheckpointError
from ..families.json_config import JsonFields, read_json_object
from ..families.spec import ModelSpec
from .draft_head import DraftHead, SharedWeights
from .eagle3 import load_eagle3
from .eagle3_config import Eagle3Config, read_eagle3
from .head_spec import HeadSpec


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
    head's first one. Raises what read_head_spec raises, and CheckpointError for tensors that are wrong or missing."""
    return load_eagle3(folder, _read(folder, target), shared, dtype, device, first_kv_layer)


def _read(folder: Path, target: ModelSpec) -> Eagle3Config:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no config.json: give the folder of a draft head")
    return read_eagle3(JsonFields(path, read_json_object(path)), target)
