"""Loads the model that drafts beside a target: checks that it fits, before anything large is read.

DraftCheckpoint.open   config and files of the draft; what it keeps of a token becomes the last layers of the layout
DraftCheckpoint.load   its weights, by the target's backend; its KV lies in the target's blocks
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ...common.errors import ConfigError
from ...config.worker_config import WorkerConfig
from ...kv.layout import DOT
from ...models.checkpoint.weights import Checkpoint
from ...models.families.registry import load_spec
from ...models.families.spec import ModelSpec
from ...models.layers.rope import rope_tables
from ...models.plan.compiled_limits import why_torch
from ...models.plan.draft_fit import check_draft_divides, check_draft_fits
from ...models.plan.kept_numbers import NONE
from ...models.plan.sharding import Share
from ...models.plan.weight_bytes import weight_bytes
from ...parallel.groups import Alone
from ..common.backend import BackendLoader, StepResources, no_progress
from .draft_model import DraftModel


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """An opened checkpoint of a model that drafts."""

    checkpoint: Checkpoint
    num_ranks: int  # that compute it: all of the worker's, or 1

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    def weight_bytes(self, dtype: str, quantize: str | None, *, keeps: bool) -> list[int]:
        """Bytes of its weights, of each rank that computes it; dtype, quantize, keeps: as the target's loader has
        them."""
        layouts = self.checkpoint.layouts if keeps else NONE
        shares = [Share(rank, self.num_ranks) for rank in range(self.num_ranks)]
        return [sum(weight_bytes(self.spec, share, dtype, quantize, layouts).values()) for share in shares]

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
        num_ranks = config.num_draft_ranks
        check_draft_fits(path, spec, served, target, max_context_tokens)
        check_draft_divides(path, spec, config.model.quantize, num_ranks)
        size, kept = config.cache.block_size, config.kv_dtype
        why = why_torch(spec, size, num_ranks, kv_dtype=kept) if packing == DOT else None
        if why is not None:
            raise ConfigError(
                f"the draft {path} cannot draft for {served}: {why}. Use another draft, or set cpu_isa to none"
            )
        return cls(stack.enter_context(Checkpoint(path, spec)), num_ranks)

    def load(self, config: WorkerConfig, loader: BackendLoader, target: StepResources) -> DraftModel:
        """loader: the target's, which has loaded that; target: its resources."""
        weights = loader.load(self.checkpoint, Share(0, self.num_ranks), no_progress)
        cos_sin = rope_tables(self.spec, len(target.cos_sin[0]), loader.torch_device)
        cache, is_shared = target.cache, self.num_ranks > 1
        group, ranks = (target.group, target.ranks) if is_shared else (Alone(), None)
        resources = StepResources(cache, cos_sin, group, ranks, first_layer=cache.layout.num_target_layers)
        if ranks is not None:
            ranks.begin_draft()
        return DraftModel(weights.step_decoder(resources), config.cache.block_size)
