"""Share of what drafts, of a rank other than 0 of several that compute it.

    DraftShare.load (before the ranks join)  ->  follow, once rank 0 has loaded its own: computes passes as it says

A draft that rank 0 computes alone is none of this: the other ranks hear of no pass.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from ...models.checkpoint.weights import Checkpoint
from ...models.families.registry import load_spec
from ...models.families.spec import ModelSpec
from ...models.layers.rope import rope_tables
from ...models.plan.rank_settings import RankSettings
from ...models.plan.sharding import Share
from ..common.backend import BackendLoader, Follow, LoadedWeights, StepResources, no_progress


@dataclass(frozen=True, slots=True)
class DraftShare:
    spec: ModelSpec  # of the whole model
    weights: LoadedWeights
    skipped: tuple[int, ...] = ()  # layers of the target, where that drafts for itself

    @classmethod
    def load(
        cls, settings: RankSettings, loader: BackendLoader, target: ModelSpec, weights: LoadedWeights
    ) -> "DraftShare | None":
        """target, weights: of the model that is served. None: nothing drafts, or rank 0 alone. Raises
        CheckpointError."""
        if settings.skipped_layers:
            return cls(target, weights, tuple(settings.skipped_layers))
        if settings.draft_model is None:
            return None
        path = Path(settings.draft_model)
        with Checkpoint(path, load_spec(path)) as checkpoint:
            share = Share(settings.rank, settings.size)
            return cls(checkpoint.spec, loader.load(checkpoint, share, no_progress))

    def follow(self, compute: Follow, resources: StepResources) -> Follow:
        """Return what computes the messages of both models. compute: those of the target; resources: its."""
        cache, cos_sin, first_layer = resources.cache, resources.cos_sin, 0
        if not self.skipped:
            cos_sin = rope_tables(self.spec, len(cos_sin[0]), cos_sin[0].device)
            first_layer = cache.layout.num_target_layers
        own = replace(resources, cos_sin=cos_sin, first_layer=first_layer)
        return self.weights.follow_draft(compute, own, self.skipped)
