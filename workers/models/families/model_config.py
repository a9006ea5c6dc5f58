"""Reads what a checkpoint says about its model: config.json, or the metadata of GGUF files. Knows no family."""

from pathlib import Path

from ...common.errors import CheckpointError
from ..gguf.gguf_config import config_of
from ..gguf.gguf_files import CONFIG_FILE, read_gguf
from .json_config import JsonFields, read_json_object

_REMEDY = "give the directory of a Hugging Face checkpoint, or a GGUF file"


def read_config(model_path: Path) -> JsonFields:
    """model_path: a folder, or a GGUF file. Raises CheckpointError."""
    if not model_path.exists():
        raise CheckpointError(f"{model_path} does not exist: {_REMEDY}")
    if (gguf := read_gguf(model_path)) is not None:
        return JsonFields(gguf.path, config_of(gguf))
    path = model_path / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{model_path} holds no {CONFIG_FILE}: {_REMEDY}")
    return JsonFields(path, read_json_object(path))
