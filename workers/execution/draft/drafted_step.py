"""DraftedStep: a step of the target, after which the draft computes its KV of the same prompts' tokens.

A watcher is told of the draft's layers last: with them it may hand the blocks off.
"""

from collections.abc import Callable

from ...core.runner import InFlightStep, LayerWatch
from ...core.sequence import Batch, SampledToken


def watch_of_target(watch: LayerWatch | None, num_layers: int) -> LayerWatch | None:
    """The part of a watch that is about the target's `num_layers` layers."""
    ends = [end for end in watch.ends if end <= num_layers] if watch is not None else []
    return LayerWatch(ends, watch.reached) if watch is not None and ends else None


class DraftedStep:
    """An InFlightStep. `computed` is called with its batch once that is computed."""

    def __init__(
        self, step: InFlightStep, batch: Batch, computed: Callable[[Batch], object], watch: LayerWatch | None
    ) -> None:
        """watch: of all layers, those of the draft too."""
        self._step, self._batch, self._computed, self._watch = step, batch, computed, watch

    def tokens(self) -> list[SampledToken]:
        sampled = self._step.tokens()
        self._computed(self._batch)
        if self._watch is not None:
            self._watch.reached(self._watch.ends[-1])
        return sampled

    def abandon(self) -> None:
        self._step.abandon()
