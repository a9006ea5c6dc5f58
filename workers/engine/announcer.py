"""What a running step makes readable of offered sequences, announced while it runs, group of layers by group of layers.

    begin: blocks computed before (a cached prefix)  ──> announced, before anything is computed
           blocks that this step will fill           ──> leased
    each group of layers computed                    ──> announced: those layers of those blocks
    end:   what the step took                        ──> the number of groups of later steps

A step that fails leaves the rest unannounced: its hand-offs are aborted, and the leases end as for any other.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..core.runner import LayerWatch
from ..core.sequence import Batch, ScheduledSequence
from ..kv.layout import KVLayout
from .events import HandoffEvent, SegmentReady
from .outgoing import OutgoingHandoffs
from .segment_cost import SegmentCost, group_ends

Tell = Callable[[list[HandoffEvent]], object]


class StepAnnouncer:
    """`begin` and `end` around each step, on the engine's thread. `num_groups`: 0 to choose by measured cost."""

    def __init__(
        self, handoffs: OutgoingHandoffs, layout: KVLayout, clock: Callable[[], float], num_groups: int = 0
    ) -> None:
        self._handoffs = handoffs
        self._layout = layout
        self._clock = clock
        self._forced = min(num_groups, layout.num_layers)
        self._cost = SegmentCost(layout.num_layers)
        self._num_prefilled = 0  # tokens of the running step, where it fills blocks of a prompt that is offered
        self._began = 0.0

    def add_reads(self, reads: Iterable[tuple[int, float]]) -> None:
        """(bytes, seconds) that a sink reports."""
        self._cost.add_reads(reads)

    def begin(self, batch: Batch, tell: Tell) -> LayerWatch | None:
        """`tell` hears of what is readable, now and while the step runs. None where nothing is to be announced."""
        self._num_prefilled = 0
        self._began = self._clock()
        if not self._handoffs.num_open:
            return None
        offered = [e for e in batch.entries if e.sequence.handoff_id is not None]
        if not offered:
            return None
        tell([event for e in offered for event in self._handoffs.announce(e.sequence)])
        leased = [(entry, segment) for entry in offered if (segment := self._handoffs.lease_next(entry)) is not None]
        if not leased:
            return None
        prompts = [(entry, segment) for entry, segment in leased if not entry.sequence.is_decoding]
        if prompts:
            self._num_prefilled = batch.num_tokens
        return self._watch(prompts, [s for e, s in leased if e.sequence.is_decoding], tell)

    def end(self) -> None:
        """The step went well."""
        if self._num_prefilled:
            self._cost.add_step(self._num_prefilled, self._clock() - self._began)
            self._num_prefilled = 0

    def _watch(
        self, prompts: list[tuple[ScheduledSequence, SegmentReady]], decoding: list[SegmentReady], tell: Tell
    ) -> LayerWatch:
        num_layers = self._layout.num_layers
        ends = group_ends(num_layers, self._num_groups(prompts))
        first_of = dict(zip(ends, (0, *ends), strict=False))

        def reached(end: int) -> None:
            began, first = self._clock(), first_of[end]
            segments: list[HandoffEvent] = [
                replace(segment, first_layer=first, num_layers=end - first) for _, segment in prompts
            ]
            if end == num_layers:
                segments += decoding  # a block each: not worth a group
            tell(segments)
            if segments:
                self._cost.add_announcements(len(segments), self._clock() - began)

        return LayerWatch(ends, reached)

    def _num_groups(self, prompts: list[tuple[ScheduledSequence, SegmentReady]]) -> int:
        if not prompts:
            return 1
        if self._forced:
            return self._forced
        num_bytes = self._layout.block_bytes * sum(len(segment.block_ids) for _, segment in prompts)
        is_last = any(entry.samples for entry, _ in prompts)
        return self._cost.num_groups(num_bytes, len(prompts), self._num_prefilled, is_last=is_last)
