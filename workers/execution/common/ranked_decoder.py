"""Passes of what drafts, over several ranks on CPU: each pass is a step message, marked as the draft's.

    rank 0    RankedDecoder: broadcast the pass, compute its share   ->   logits
    others    follow_both: compute theirs, and the steps of the model that is served

A draft that rank 0 computes alone is none of this: the other ranks hear of no pass.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from ...common.errors import RankLost
from ...models.layers.step import Int32s, Step, StepLimits, is_of_draft
from ...ranks.rank_processes import RankProcesses
from ...sampling.sampler import Sampler
from .backend import Follow, StepDecoder, StepResources


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


def follow_both(compute: Follow, decoder: StepDecoder, resources: StepResources, vocab_size: int) -> Follow:
    """Return what computes the messages of both models. compute: those of the target; decoder: of what drafts, whose
    resources and vocabulary these are."""
    cache, num_positions = resources.cache, len(resources.cos_sin[0])
    limits = StepLimits(cache.layout.block_size, cache.num_blocks, num_positions, vocab_size)

    def compute_either(message: Int32s) -> None:
        if is_of_draft(message):
            decoder.compute(Step.from_message(message, limits, is_draft=True))
        else:
            compute(message)

    return compute_either
