"""Loads the head that a folder holds; head_specs/head_config.py says which one that is."""

from pathlib import Path

import torch

from ..families.spec import ModelSpec
from ..head_specs.eagle3_config import Eagle3Config
from ..head_specs.head_config import read_head
from .draft_head import DraftHead, SharedWeights
from .eagle3 import load_eagle3
from .mtp import load_mtp


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
    config = read_head(folder, target)
    if isinstance(config, Eagle3Config):
        return load_eagle3(folder, config, shared, dtype, device, first_kv_layer)
    return load_mtp(folder, config, shared, dtype, device, first_kv_layer)
