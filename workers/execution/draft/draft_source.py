"""DraftSource: what the settings say that drafts, for whoever loads a model; the only file that knows all kinds.

open   read and check configs and files   ->   kv_shape, taken, weight_bytes   ->   load, once the target is loaded
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ...config.worker_config import WorkerConfig
from ...models.checkpoint.weights import Checkpoint
from ...models.families.spec import ModelSpec
from ...models.layers.hidden_states import HiddenStates
from ...models.plan.kv_plan import DraftKVShape
from ...models.plan.skipped_layers import skipped_layers_of
from ..common.backend import BackendLoader, LoadedWeights, StepResources
from .draft_loader import DraftCheckpoint
from .draft_model import DraftModel
from .guarded_draft import ComputingProposer
from .head_loader import HeadSource


@dataclass(frozen=True, slots=True)
class DraftSource:
    """Kinds of what drafts, of which one at most is there."""

    checkpoint: DraftCheckpoint | None
    head: HeadSource | None
    skipped: list[int]  # layers of the target

    @classmethod
    def open(
        cls, config: WorkerConfig, target: ModelSpec, max_context_tokens: int, packing: str, stack: ExitStack
    ) -> "DraftSource":
        """target: spec of the model that is served; packing: of its KV. stack: closes files. Raises ConfigError,
        CheckpointError or UnsupportedArchitecture, naming both models."""
        return cls(
            DraftCheckpoint.open(config, target, max_context_tokens, packing, stack),
            HeadSource.open(config, target, max_context_tokens, packing),
            skipped_layers_of(config, target),
        )

    @property
    def taken(self) -> HiddenStates | None:
        """Hidden states that the target's steps must leave."""
        return self.head.taken if self.head is not None else None

    def weight_bytes(self, target: ModelSpec, dtype: str, quantize: str | None, *, keeps: bool) -> list[int]:
        """Bytes of the weights that the first ranks load beside the target's. dtype, quantize, keeps: as the target's
        loader has them; a head's weights are not quantised. Raises CheckpointError for a head's files that are
        broken."""
        if self.checkpoint is not None:
            return self.checkpoint.weight_bytes(dtype, quantize, keeps=keeps)
        return [self.head.weight_bytes(target, dtype) if self.head is not None else 0]

    def kv_shape(self, target_id: str, id_of: Callable[[Checkpoint], str]) -> DraftKVShape | None:
        """KV of its own layers; None: it has none. target_id, id_of: names of models, as workers compare them."""
        if self.checkpoint is not None:
            of = self.checkpoint
            return DraftKVShape(of.spec.kv, id_of(of.checkpoint), num_ranks=of.num_ranks)
        return self.head.kv_shape(target_id) if self.head is not None else None

    def load(
        self,
        config: WorkerConfig,
        target: Checkpoint,
        weights: LoadedWeights,
        resources: StepResources,
        loader: BackendLoader,
    ) -> ComputingProposer | None:
        """target, weights, resources, loader: of the model that is served, which is loaded; None: no model drafts."""
        cache, num_positions = resources.cache, len(resources.cos_sin[0])
        if self.checkpoint is not None:
            return self.checkpoint.load(config, loader, resources)
        if self.head is not None:
            return self.head.load(config, target, loader, cache, num_positions)
        if self.skipped:
            if resources.ranks is not None:
                resources.ranks.begin_draft()
            return DraftModel(weights.step_decoder(resources, self.skipped), config.cache.block_size)
        return None
