"""Reads how a checkpoint's embeddings are made of its hidden states. Knows no tensor.

A folder of sentence-transformers says so in modules.json and in the config.json of its Pooling module; others have the
last token's hidden state, normalised, as in vLLM. What cannot be computed refuses embeddings, not the model.
"""

import json
from pathlib import Path
from typing import Any, cast

from ...common.errors import CheckpointError
from ...core.embedding import EmbeddingSpec, Pooling
from .json_config import JsonFields, read_json_object
from .model_config import read_config

MODULES, CONFIG = "modules.json", "config.json"
POOLING_FOLDER = "1_Pooling"  # where there is no modules.json
MOST_DIMENSIONS = 64
_MODES = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN}
# Names of the modes in older files, each a flag.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def read_embedding_spec(model_path: Path, hidden_size: int) -> EmbeddingSpec:
    """Raises CheckpointError for a file that is damaged."""
    config = read_config(model_path)
    dimensions = _dimensions(config, hidden_size)
    may_be_cut = bool(dimensions) or config.get("is_matryoshka") is True
    refusal = _why_not_causal(config)
    modules, pooling, normalised = _modules(model_path), Pooling.LAST, True
    if modules is not None:
        kinds = [kind for kind, _ in modules]
        normalised = "Normalize" in kinds
        unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
        if unknown:
            refusal = refusal or f"its {MODULES} has the module {unknown[0][:64]}, which is not computed here"
    folder = POOLING_FOLDER if modules is None else next((path for kind, path in modules if kind == "Pooling"), None)
    if folder is not None and (path := model_path / folder / CONFIG).is_file():
        mode = _mode(JsonFields(path, read_json_object(path)))
        if mode in _MODES:
            pooling = _MODES[mode]
        else:
            refusal = refusal or f"its hidden states are pooled in another way than lasttoken or mean ({mode[:64]})"
    return EmbeddingSpec(hidden_size, pooling, normalised, may_be_cut, dimensions, refusal)


def _why_not_causal(config: JsonFields) -> str:
    for name, value in (("is_causal", False), ("use_bidirectional_attention", True), ("is_bidirectional", True)):
        if config.get(name) is value:
            return f"its tokens attend to later ones ({name} in {CONFIG}), which is not computed here"
    return ""


def _dimensions(config: JsonFields, hidden_size: int) -> tuple[int, ...]:
    name = "matryoshka_dimensions"
    given: Any = config.get(name)
    if given is None:
        return ()
    sizes = cast("list[Any]", given) if isinstance(given, list) else [None]
    if len(sizes) > MOST_DIMENSIONS or not all(type(size) is int and 1 <= size <= hidden_size for size in sizes):
        raise config.error(name, f"must be a list of at most {MOST_DIMENSIONS} sizes in [1, {hidden_size}]", given)
    return tuple(cast("list[int]", sizes))


def _modules(model_path: Path) -> list[tuple[str, str]] | None:
    """Kind and folder of each module of sentence-transformers, in order; None: the checkpoint has no list of them."""
    path = model_path / MODULES
    if not path.is_file():
        return None
    wrong = f"{path} must be a list of modules, each with type and path: fetch the checkpoint again"
    try:
        listed: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{wrong} ({e})") from e
    found: list[tuple[str, str]] = []
    for module in cast("list[Any]", listed) if isinstance(listed, list) else [None]:
        fields = cast("dict[str, Any]", module) if isinstance(module, dict) else {}
        kind, folder = fields.get("type"), fields.get("path")
        if not (isinstance(kind, str) and isinstance(folder, str)):
            raise CheckpointError(wrong)
        if ".." in Path(folder).parts or Path(folder).is_absolute():
            raise CheckpointError(f"{path} names a module outside the checkpoint ({folder[:64]}): leave it out")
        found.append((kind.rpartition(".")[2], folder))
    return found


def _mode(config: JsonFields) -> str:
    """Mode of a Pooling module; of several, which are joined, their names with a plus."""
    if not config.flag("include_prompt", default=True):
        return "those after a prompt of its own"
    given: Any = config.get("pooling_mode")
    if given is None:
        return "+".join(mode for name, mode in _FLAGS.items() if config.flag(name)) or "mean"
    modes = cast("list[Any]", given) if isinstance(given, list) else [given]
    if not all(isinstance(mode, str) for mode in modes):
        raise config.error("pooling_mode", "must be the name of a mode, or a list of names", given)
    return "+".join(cast("list[str]", modes))
