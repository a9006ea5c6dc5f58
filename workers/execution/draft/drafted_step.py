"""DraftedStep: a step of the target, after which the draft computes its KV of the same prompts' tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from ...core.runner import InFlightStep
from ...core.sequence import Batch, IsHere, SampledToken


@dataclass(slots=True)
class DraftedStep:
    """An InFlightStep. `computed` is called with its batch once that is computed."""

    step: InFlightStep
    batch: Batch
    computed: Callable[[Batch], object]

    def sample(self, is_here: IsHere) -> None:
        self.step.sample(is_here)

    def tokens(self) -> list[SampledToken]:
        sampled = self.step.tokens()
        self.computed(self.batch)
        return sampled

    def abandon(self) -> None:
        self.step.abandon()
