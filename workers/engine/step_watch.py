"""Watch of a step that fills blocks of sequences on offer: what is announced once some of its layers are computed.

With two steps in flight each has its own; a step's is told nothing before the step before it is over.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from ..core.runner import LayerWatch
from ..handoff.types import SegmentReady


@dataclass(frozen=True, slots=True)
class StepWatch(LayerWatch):
    num_prefilled: int  # tokens of the step, where it fills blocks of a prompt; else 0
    leased: SequenceOf[SegmentReady]  # for the step, of all layers

    @classmethod
    def of(
        cls,
        ends: SequenceOf[int],
        num_prefilled: int,
        prompts: SequenceOf[SegmentReady],
        decoding: SequenceOf[SegmentReady],
        announce: Callable[[list[SegmentReady]], object],
    ) -> "StepWatch":
        """Watch that calls `announce` after each of `ends`, see LayerWatch. prompts: segments that are announced a few
        layers at a time; decoding: a block each, which is not worth a group of layers, so announced with the last."""
        first_of = dict(zip(ends, (0, *ends), strict=False))

        def reached(end: int) -> None:
            ready = [_some_layers(segment, first_of[end], end) for segment in prompts]
            announce(ready + list(decoding) if end == ends[-1] else ready)

        return cls(ends, reached, num_prefilled, [*prompts, *decoding])


def _some_layers(ready: SegmentReady, first: int, end: int) -> SegmentReady:
    return SegmentReady(ready.handoff_id, replace(ready.segment, first_layer=first, num_layers=end - first))
