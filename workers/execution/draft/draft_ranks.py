"""Passes of a model that drafts, over several ranks: each pass is a step message, marked as the draft's.

    rank 0    RankedDecoder: broadcast the pass, compute its share   ->   logits
    others    DraftShare.load (before they join)  ->  follow: compute theirs

A draft that rank 0 computes alone is none of this: the other ranks hear of no pass.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ...common.errors import RankLost
from ...models.checkpoint.weights import Checkpoint
from ...models.families.registry import load_spec
from ...models.families.spec import ModelSpec
from ...models.layers.rope import rope_tables
from ...models.layers.step import Int32s, Step, StepLimits, is_of_draft
from ...models.plan.rank_settings import RankSettings
from ...models.plan.sharding import Share
from ...ranks.rank_processes import RankProcesses
from ...sampling.sampler import Sampler
from ..common.backend import BackendLoader, Follow, LoadedWeights, StepDecoder, StepResources, no_progress


@dataclass(frozen=True, slots=True)
class RankedDecoder:
    """A StepDecoder of rank 0 whose steps the other ranks compute, too."""

    decoder: StepDecoder
    ranks: RankProcesses

    @property
    def sampler(self) -> Sampler:
        return self.decoder.sampler

    @property
    def passes(self) -> None:
        """See StepDecoder."""

    def compute(self, step: Step) -> Tensor | None:
        """See StepDecoder. If it fails, all ranks end; raises RankLost, which names the cause."""
        try:
            self.ranks.broadcast(replace(step, is_draft=True).to_message())
            return self.decoder.compute(step)
        except Exception as e:
            # As in a step of the target: the other ranks wait in the middle of it.
            error = e if isinstance(e, RankLost) else RankLost(f"rank 0 failed in a pass of the draft ({e})")
            raise self.ranks.fail(error) from e


def with_ranks(decoder: StepDecoder, ranks: RankProcesses | None) -> StepDecoder:
    """ranks: those that compute with us; None: nobody does."""
    return decoder if ranks is None else RankedDecoder(decoder, ranks)


@dataclass(frozen=True, slots=True)
class DraftShare:
    """The share of what drafts, of a rank other than 0."""

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
        num_positions = len(cos_sin[0])
        if not self.skipped:
            cos_sin = rope_tables(self.spec, num_positions, cos_sin[0].device)
            first_layer = cache.layout.num_target_layers
        own = replace(resources, cos_sin=cos_sin, first_layer=first_layer)
        decoder = self.weights.step_decoder(own, self.skipped)
        limits = StepLimits(cache.layout.block_size, cache.num_blocks, num_positions, self.spec.vocab_size)

        def compute_either(message: Int32s) -> None:
            if is_of_draft(message):
                decoder.compute(Step.from_message(message, limits, is_draft=True))
            else:
                compute(message)

        return compute_either
