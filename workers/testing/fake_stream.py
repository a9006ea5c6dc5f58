"""Steps launched on a fake device, computed in order: each when it is waited for, or before.

What a step was given it keeps: whatever the engine does to its books meanwhile, the device does not see.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..common.prompt_logprobs import PromptLogprobs
from ..core.drafting import settle
from ..core.runner import LayerWatch
from ..core.sequence import KNOWN, Batch, DraftEntry, SampledRow, SampledToken, ScheduledSequence, Sequence
from ..sampling.pooled_rows import PooledRows
from ..sampling.prompt_rows import PromptRows


@dataclass(slots=True)
class FakeRow:
    """An entry of a batch, as the runner was given it."""

    of: SampledRow
    table: list[int]
    token_ids: list[
        int
    ]  # up to the last new one; a row whose input is from the previous step gets that when it is computed
    start: int  # of the new ones
    samples: bool
    num_pooled: int = 0  # of the new ones, the last so many are pooled
    prompt_first: int = 0  # log-probabilities are due of its tokens [prompt_first, prompt_end)
    prompt_end: int = 0

    @property
    def sequence(self) -> Sequence:
        return self.of.sequence


@dataclass(slots=True, eq=False)
class FakeStep:
    """An InFlightStep."""

    stream: "FakeStream"
    entries: SequenceOf[ScheduledSequence]
    rows: list[FakeRow]
    watch: LayerWatch | None
    before: list[Callable[[], object]]  # work that is queued before it
    feeds: list[int]  # of each row: which of the tokens that the previous step yields is its input, or KNOWN
    previous_entries: SequenceOf[int]
    prompt_logprobs: list[tuple[Sequence, PromptLogprobs]] | None = None  # the batch's
    pooled: list[tuple[Sequence, NDArray[np.float64]]] | None = None  # the batch's
    sampled: list[SampledToken] = field(default_factory=list[SampledToken])
    is_computed: bool = False
    told: list[int] = field(default_factory=list[int])  # layers of which the watch is told when the step is waited for

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return sum(len(row.token_ids) - row.start for row in self.rows)

    def tokens(self) -> list[SampledToken]:
        try:
            self.stream.compute_launched(self)
            if self.watch is not None:
                for layer in self.told:
                    self.watch.reached(layer)
            return self.sampled
        finally:
            self.abandon()

    def abandon(self) -> None:
        self.stream.forget(self)


class FakeStream:
    """Fake of a stream of steps, at most two of them in flight. `compute`: what a step yields, whose rows have all
    their tokens."""

    def __init__(self, compute: Callable[[FakeStep], list[SampledToken]]) -> None:
        self._compute = compute
        self._under_way: list[FakeStep] = []
        self._queued: list[Callable[[], object]] = []  # after the last step
        self._last: list[int] = []  # that the last step computed yielded

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def launch(self, batch: Batch, watch: LayerWatch | None) -> FakeStep:
        rows = [row for entry in batch.entries for row in _rows_of(entry)]
        feeds = [KNOWN] * len(rows)
        if batch.previous_entries:
            [before] = self._under_way
            pairs = zip(rows, batch.previous_entries, strict=True)
            rows = [row if i == KNOWN else _row_after(row, before, i) for row, i in pairs]
            sampled = list(accumulate((row.samples for row in before.rows), initial=0))
            feeds = [KNOWN if i == KNOWN else sampled[i] for i in batch.previous_entries]
        assert len(self._under_way) < 2, "a third step is launched"
        if batch.prompt_logprobs is not None:
            for span in PromptRows.of(batch.entries).spans:
                row = next(row for row in rows if row.sequence is span.sequence)
                row.prompt_first, row.prompt_end = span.first, span.end
        if batch.pooled is not None:
            counts = dict(PooledRows.of(batch.entries).spans)
            for row in rows:
                row.num_pooled = counts.get(row.sequence, 0)
        given = batch.previous_entries, batch.prompt_logprobs, batch.pooled
        step = FakeStep(self, batch.entries, rows, watch, self._queued, feeds, *given)
        self._queued = []
        self._under_way.append(step)
        return step

    def queue(self, work: Callable[[], object]) -> None:
        """Do `work` after the steps that are launched: as late as possible, if somebody waits for them or not."""
        self._queued.append(work)
        if not self._under_way:
            _do(self._queued)

    def forget(self, step: FakeStep) -> None:
        self._under_way.remove(step)
        _do(step.before)
        if not self._under_way:
            _do(self._queued)

    def compute_launched(self, last: FakeStep | None = None) -> None:
        """Compute the steps that are launched and not computed yet, in order: up to `last`, or all."""
        for step in list(self._under_way):
            if not step.is_computed:
                for row, i in zip(step.rows, step.feeds, strict=True):
                    row.token_ids += [self._last[i]] if i != KNOWN else []
                _do(step.before)
                watch = step.watch
                if last is None and watch is not None:  # nobody waits for it yet
                    step.watch = LayerWatch(watch.ends, step.told.append)
                sampled = self._compute(step)
                step.watch = watch
                step.is_computed = True
                self._last = [token.token_id for token in sampled]
                step.sampled = settle(step.entries, sampled)
            if step is last:
                return


def _do(queued: list[Callable[[], object]]) -> None:
    while queued:
        queued.pop(0)()


def _rows_of(entry: ScheduledSequence) -> list[FakeRow]:
    sequence, start = entry.sequence, entry.start
    table = list(sequence.block_table)
    if isinstance(entry, DraftEntry):
        known = sequence.token_ids + entry.draft
        return [FakeRow(row, table, known[: start + i + 1], start + i, True) for i, row in enumerate(entry.rows())]
    return [FakeRow(sequence, table, sequence.token_ids[: start + entry.num_new], start, entry.samples)]


def _row_after(row: FakeRow, before: FakeStep, index: int) -> FakeRow:
    """The row, whose input token is what row `index` of the previous step yields."""
    last = before.rows[index]
    assert last.sequence is row.sequence and last.samples
    known = row.sequence.token_ids
    return FakeRow(row.sequence, row.table, list(known), len(known), True)
