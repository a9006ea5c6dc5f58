"""Steps launched on a fake device, computed in order: each when it is waited for, or before.

What a step was given it keeps: whatever the engine does to its books meanwhile, the device does not see. Only masks are
made later, when a step is to be sampled; until then its KV may be stored, and no more.
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
from ..core.sequence import (
    KNOWN,
    Batch,
    DraftEntry,
    IsHere,
    SampledRow,
    SampledToken,
    ScheduledSequence,
    Sequence,
    everybody,
)
from ..sampling.grammar_masks import GrammarMasks, Masks
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
    masks: dict[int, Masks] | None = None  # by sampled row; None: they are not made yet
    sampled: list[SampledToken] = field(default_factory=list[SampledToken])
    is_stored: bool = False  # its KV
    is_computed: bool = False
    told: list[int] = field(default_factory=list[int])  # layers of which the watch is told when the step is waited for

    @property
    def waits(self) -> bool:
        """Return whether it cannot be sampled yet."""
        return self.masks is None and any(row.samples and row.of.matcher is not None for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return sum(len(row.token_ids) - row.start for row in self.rows)

    def sample(self, is_here: IsHere) -> None:
        if self.masks is None:
            self.masks = self.stream.masks_of([row.of for row in self.rows if row.samples], is_here)

    def tokens(self) -> list[SampledToken]:
        try:
            self.sample(everybody)
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
    their tokens, and its masks; `store`: what it does of that, but for sampling, if it is not `is_stored`."""

    def __init__(
        self,
        compute: Callable[[FakeStep], list[SampledToken]],
        masks: GrammarMasks,
        store: Callable[[FakeStep], object] | None = None,
    ) -> None:
        self._compute, self._masks, self._store = compute, masks, store
        self._under_way: list[FakeStep] = []
        self._queued: list[Callable[[], object]] = []  # after the last step
        self._last: list[int] = []  # that the last step computed yielded

    def __bool__(self) -> bool:
        return bool(self._under_way)

    @property
    def under_way(self) -> SequenceOf[FakeStep]:
        """Steps that nobody has waited for, in order."""
        return tuple(self._under_way)

    def masks_of(self, rows: SequenceOf[SampledRow], is_here: IsHere) -> dict[int, Masks]:
        """Make the masks of those rows that have one."""
        pending = self._masks.begin(rows, is_here)
        return {} if pending is None else dict(zip(pending.rows, pending.masks().copy(), strict=True))

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
        assert not any(step.waits for step in self._under_way), "a step is launched before one that is not sampled"
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
                if not step.is_stored:
                    for row, i in zip(step.rows, step.feeds, strict=True):
                        row.token_ids += [self._last[i]] if i != KNOWN else []
                    _do(step.before)
                watch = step.watch
                if last is None and watch is not None:  # nobody waits for it yet
                    step.watch = LayerWatch(watch.ends, step.told.append)
                if step.waits:
                    assert self._store is not None
                    self._store(step)
                    step.watch, step.is_stored = watch, True
                    return
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
