"""Checkpoints with the modules of sentence-transformers, and embeddings as transformers' hidden states give them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diptych.workers.core.embedding import Pooling

from .checkpoints import one_thread, reference_model

TYPES = "sentence_transformers.models."


def with_modules(path: Path, folder: Path, mode: str, *others: str) -> Path:
    """Checkpoint of the same weights in `folder`, whose embeddings are pooled by `mode`. others: kinds of its modules
    after the pooling."""
    folder.mkdir(parents=True)
    for file in path.iterdir():
        (folder / file.name).symlink_to(file)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"} | {f"{i}_{kind}": kind for i, kind in enumerate(others, 2)}
    modules = [
        {"idx": i, "name": str(i), "path": at, "type": TYPES + kind} for i, (at, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    return folder


def reference_embeddings(path: Path, prompts: Sequence[Sequence[int]], pooling: Pooling) -> list[torch.Tensor]:
    """Pooled hidden states of transformers' own model, float32, not normalised."""
    model: Any = reference_model(path)
    model = getattr(model.base_model, "language_model", model.base_model)
    with torch.inference_mode(), one_thread():
        states = [model(torch.tensor([list(prompt)])).last_hidden_state[0] for prompt in prompts]
    return [of[-1] if pooling is Pooling.LAST else of.mean(dim=0) for of in states]
