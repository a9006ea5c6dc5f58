"""The WeightFormat of each way in which a checkpoint may be quantised (quantisation.py)."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..families.compressed_config import CompressedTensors
from ..families.quantisation import (
    Awq,
    BitsAndBytes,
    Fp8,
    Gguf,
    Gptq,
    ModelOpt,
    Mxfp4,
    TorchAo,
    read_quantisation,
)
from .awq import AwqFormat
from .bitsandbytes import BitsAndBytesFormat
from .compressed_tensors import CompressedTensorsFormat
from .fp8 import Fp8Format
from .gguf import GgufFormat
from .gptq import GptqFormat
from .marlin24 import Marlin24Format
from .modelopt import ModelOptFormat
from .mxfp4 import Mxfp4Format
from .sparse24 import Sparse24Format
from .stored_weight import WeightFormat
from .torchao import TorchAoFormat

log = logging.getLogger("diptych.worker")


def _compressed_tensors(config: CompressedTensors) -> WeightFormat:
    plain = CompressedTensorsFormat(config)
    if config.has_marlin or config.is_sparse:
        log.info("2:4 sparse weights are expanded as they are loaded, and computed as dense ones")
    inner = Marlin24Format(config, plain) if config.has_marlin else plain
    return Sparse24Format(inner) if config.is_sparse else inner


_FORMATS: dict[type, Callable[[Any], WeightFormat]] = {
    CompressedTensors: _compressed_tensors,
    Gguf: GgufFormat,
    Gptq: GptqFormat,
    Awq: AwqFormat,
    Fp8: Fp8Format,
    Mxfp4: Mxfp4Format,
    ModelOpt: ModelOptFormat,
    BitsAndBytes: BitsAndBytesFormat,
    TorchAo: TorchAoFormat,
}


def weight_format(model_path: Path) -> WeightFormat | None:
    """Return how the weights of the checkpoint in a folder are quantised; None: not. Raises CheckpointError."""
    config = read_quantisation(model_path)
    return None if config is None else _FORMATS[type(config)](config)
