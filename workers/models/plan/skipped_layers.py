"""The file that names the layers which a model skips where it drafts for itself (method `self`). No torch.
workers/execution/skip_search.py makes it.

{"num_layers": 30, "skipped_layers": [5, 9, 14], ...}     what else it holds is for readers
"""

import json
from pathlib import Path
from typing import Any

from ...common.errors import ConfigError
from ...config.worker_config import WorkerConfig
from ..families.spec import ModelSpec

_REMEDY = "make it with python -m diptych.workers.execution.skip_search"


def skipped_layers_of(config: WorkerConfig, spec: ModelSpec) -> list[int]:
    """Layers that the settings' model skips where it drafts, ascending; none where it does not draft for itself. Raises
    ConfigError."""
    file = config.speculation.skipped_layers
    return [] if file is None else read_skipped_layers(Path(file), Path(config.model.model), spec)


def read_skipped_layers(file: Path, model: Path, spec: ModelSpec) -> list[int]:
    """Read the layers that `model` skips, ascending. Raises ConfigError for a file that does not fit it."""
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        num_layers, skipped = int(found["num_layers"]), sorted({int(layer) for layer in found["skipped_layers"]})
    except OSError as e:
        raise ConfigError(f"skipped_layers: {file} cannot be read ({e.strerror}): {_REMEDY}") from e
    except (ValueError, KeyError, TypeError) as e:
        text = "has no num_layers and skipped_layers"
        raise ConfigError(f"skipped_layers: {file} {text}: {_REMEDY}") from e
    if num_layers != spec.num_layers:
        sizes = f"a model of {num_layers} layers, and {model} has {spec.num_layers}"
        raise ConfigError(f"skipped_layers: {file} was made for {sizes}: {_REMEDY}")
    if not skipped or not 0 <= skipped[0] <= skipped[-1] < num_layers or len(skipped) == num_layers:
        some = f"must name some of the layers 0 to {num_layers - 1}, but not all"
        raise ConfigError(f"skipped_layers: {file} {some}; it names {skipped}")
    check_may_skip(model, spec)
    return skipped


def check_may_skip(model: Path, spec: ModelSpec) -> None:
    """Raise ConfigError for a model that cannot be computed without some of its layers."""
    if any(layer.kv_from is not None or layer.token_input is not None for layer in spec.layers):
        why = "its layers read another one's keys and values, or an input of each token"
        raise ConfigError(f"{model} cannot draft for itself: {why}. Use another method of speculation")
