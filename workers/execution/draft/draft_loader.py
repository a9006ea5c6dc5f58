"""Loads the model that drafts beside a target: checks that it fits, before anything large is read.

DraftCheckpoint.open   config and files of the draft; what it keeps of a token becomes the last layers of the layout
DraftCheckpoint.load   its weights, by the target's backend; its KV lies in the target's blocks
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...common.errors import ConfigError
from ...config.worker_config import WorkerConfig
from ...device.kv_cache import KVCache
from ...kv.layout import DOT
from ...models.checkpoint.weights import Checkpoint
from ...models.families.registry import load_spec
from ...models.families.spec import ModelSpec
from ...models.layers.rope import rope_tables
from ...models.plan.compiled_limits import why_torch
from ...models.plan.formats import check_shares
from ...models.plan.kv_plan import DraftKVShape
from ...models.plan.sharding import WHOLE
from ...parallel.groups import Alone
from ..common.backend import BackendLoader, StepResources, no_progress
from .draft_model import DraftModel


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """An opened checkpoint of a model that drafts."""

    checkpoint: Checkpoint

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    def kv_shape(self, model_id: str) -> DraftKVShape:
        """model_id: of the draft, as workers compare it."""
        return DraftKVShape(self.spec.kv, model_id)

    @classmethod
    def open(
        cls, config: WorkerConfig, target: ModelSpec, max_context_tokens: int, packing: str, stack: ExitStack
    ) -> "DraftCheckpoint | None":
        """Open the draft that the settings name; None: they name none. target: spec of the model that is served;
        packing: of its KV. stack: closes the files. Raises ConfigError or CheckpointError, naming both models."""
        folder = config.speculation.draft_model
        if folder is None or config.speculation.has_head:
            return None
        path, served = Path(folder), Path(config.model.model)
        spec = load_spec(path)
        check_shares(spec, config.model.quantize, 1)
        _check_vocabularies(path, spec, served, target)
        what = f"the draft {path}"
        if spec.kv.num_vectors != target.kv.num_vectors:
            raise ConfigError(
                f"{what} and {served} do not both have, or both lack, latent attention: use a draft alike"
            )
        if spec.longest_context < max_context_tokens:
            raise ConfigError(
                f"{what} has {spec.longest_context} positions, fewer than max_context_tokens={max_context_tokens} of "
                f"{served}: lower max_context_tokens, or use another draft"
            )
        why = why_torch(spec, config.cache.block_size) if packing == DOT else None
        if why is not None:
            raise ConfigError(f"{what} cannot draft for {served}: {why}. Use another draft, or set cpu_isa to none")
        return cls(stack.enter_context(Checkpoint(path, spec)))

    def load(self, config: WorkerConfig, loader: BackendLoader, cache: KVCache, max_context_tokens: int) -> DraftModel:
        """loader: the target's, which has loaded that."""
        weights = loader.load(self.checkpoint, WHOLE, no_progress)
        cos_sin = rope_tables(self.spec, max_context_tokens, loader.torch_device)
        resources = StepResources(cache, cos_sin, Alone(), first_layer=cache.layout.num_target_layers)
        return DraftModel(weights.step_decoder(resources), config.cache.block_size)


def _check_vocabularies(draft_path: Path, draft: ModelSpec, path: Path, target: ModelSpec) -> None:
    """Raise ConfigError unless both models have the same tokens."""
    remedy = "a draft needs the vocabulary of the model that is served"
    if draft.vocab_size != target.vocab_size:
        sizes = f"{draft.vocab_size:,} tokens, and {path} {target.vocab_size:,}"
        raise ConfigError(f"the draft {draft_path} has a vocabulary of {sizes}: {remedy}")
    own, other = _tokens(draft_path), _tokens(path)
    if own is not None and other is not None and own != other:
        token = min(token for token, _ in own.items() ^ other.items())
        ids = f"the token {token!r} has the id {own.get(token)} there and {other.get(token)} here"
        raise ConfigError(f"the draft {draft_path} has another vocabulary than {path}: {ids}; {remedy}")


def _tokens(path: Path) -> dict[str, int] | None:
    """Tokens of a folder's tokenizer.json, with their ids; None: it has no such file, or one of another kind."""
    try:
        with (path / "tokenizer.json").open(encoding="utf-8") as file:
            found: Any = json.load(file)["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return cast(dict[str, int], found) if isinstance(found, dict) else None
