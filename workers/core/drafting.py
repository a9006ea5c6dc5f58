"""Speculation's part of a step: drafts, which are verified, several tokens of a sequence in one step.

    Drafter.draft ──> DraftEntry: the last token and k drafted ones, each computed and sampled from
                          └─ settle: those that are as drafted, and the token after them, are what the step yields

Every row is sampled as the target's next token, with the noise of its own position, as if the drafted tokens before it
had been generated. So a draft changes how many tokens a step yields, and never which: greedy or seeded, an answer is
the one that it is without drafts (Leviathan et al. 2023, §2.3, for drafts without randomness and noise that is fixed).

Drafted tokens are not in Sequence.token_ids before they are accepted. What is computed of the others is written over:
`num_computed` does not count it. A draft takes blocks that are free, and nobody is preempted for it.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from ..kv.layout import blocks_for
from .block_manager import BlockManager
from .draft_kv import DraftKV
from .sequence import Batch, DraftEntry, SampledRow, SampledToken, ScheduledSequence, Sequence

MAX_DRAFT_TOKENS = 16  # of a sequence, in a step
MAX_DRAFTED = 256  # of all sequences: with more rows, a step takes longer in proportion, and drafts hardly pay


def max_drafted(max_running: int) -> int:
    """Return the most tokens that a step drafts: buffers of a fixed size have room for them. max_running: sequences of
    a step."""
    return min(max_running * MAX_DRAFT_TOKENS, MAX_DRAFTED)


Reserve = Callable[[Sequence, int], int]  # allocates blocks for a draft of so many tokens; returns how many fit


class Drafter(Protocol):
    """Proposes drafts, and decides how long they are."""

    @property
    def method(self) -> str:
        """Name under which its drafts are counted."""
        ...

    def rests(self) -> bool:
        """Return whether it is decided already that a step has no drafts: then nothing else is called for that. Once a
        step, first of all."""
        ...

    def draft(self, sequences: SequenceOf[Sequence], num_rows: int, room: int, reserve: Reserve) -> list[list[int]]:
        """Return a draft for each of these sequences, of which every one decodes one token; empty where none pays.
        num_rows: rows of the step without drafts, these sequences' and others'. room: the most tokens of all drafts.
        reserve: for drafters that compute in the sequence's own blocks; a draft is shortened to what fits anyway."""
        ...

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Note how many tokens of a draft were accepted; called before they are added to the sequence."""
        ...

    def measured(self, num_rows: int, seconds: float) -> None:
        """Note the time of a step of nothing but decodes, with drafts or without. num_rows: those of drafts too."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that leaves this worker: it finished, failed or moved."""
        ...


def rows_of(entries: SequenceOf[ScheduledSequence]) -> list[SampledRow]:
    """Rows of a step that are sampled, in order."""
    rows: list[SampledRow] = []
    for entry in entries:
        if isinstance(entry, DraftEntry):
            rows += entry.rows()
        elif entry.samples:
            rows.append(entry.sequence)
    return rows


def settle(entries: SequenceOf[ScheduledSequence], sampled: list[SampledToken]) -> list[SampledToken]:
    """Return what a step yields of the tokens that its rows gave, in order."""
    if not any(isinstance(entry, DraftEntry) for entry in entries):
        return sampled
    found: list[SampledToken] = []
    first = 0
    for entry in entries:
        if isinstance(entry, DraftEntry):
            found += entry.settle(sampled[first : first + entry.num_new])
            first += entry.num_new
        elif entry.samples:
            found.append(sampled[first])
            first += 1
    return found


class Drafting:
    """Adds drafts to the entries of sequences that decode."""

    def __init__(
        self,
        drafter: Drafter | None,
        manager: BlockManager,
        block_size: int,
        max_drafted: int,
        draft_kv: DraftKV | None = None,
    ) -> None:
        """max_drafted: tokens that a step drafts at most, see there. draft_kv: of a draft that keeps KV of its own."""
        self.drafter, self._manager, self._block_size = drafter, manager, block_size
        self._max_drafted, self._draft_kv = max_drafted, draft_kv
        self._rests = drafter is None  # the drafter, in the step that was scheduled last

    def admitted(self, sequence: Sequence) -> None:
        """Count what is known of a sequence that begins with blocks of the prefix cache."""
        if self._draft_kv is not None:
            self._draft_kv.found(sequence)

    def extend(
        self, entries: list[ScheduledSequence], num_runs: int, max_tokens: int
    ) -> tuple[list[ScheduledSequence], int]:
        """Give drafts to some of the entries, of which the last `num_runs` are of runs. Returns all entries, those with
        drafts last, and how many are of runs or have drafts. max_tokens: of all entries, with their drafts."""
        if self.drafter is None:
            return entries, num_runs
        self._rests = self.drafter.rests()
        if self._rests:
            return entries, num_runs
        num_decodes = len(entries) - num_runs
        num_rows = num_decodes + sum(e.num_new for e in entries[num_decodes:])
        wanted = [e for e in entries[:num_decodes] if _may_draft(e)]
        if not wanted or num_rows >= max_tokens:
            return entries, num_runs
        room = min(max_tokens - num_rows, self._max_drafted)
        drafts = self.drafter.draft([e.sequence for e in wanted], num_rows, room, self._reserve)
        assert sum(map(len, drafts)) <= room, "a drafter has drafted more than there is room for"
        made: dict[Sequence, DraftEntry] = {}
        for entry, draft in zip(wanted, drafts, strict=True):
            fitting = self._fitting(entry.sequence, draft) if draft else draft
            if fitting:
                made[entry.sequence] = DraftEntry(entry.sequence, 1 + len(fitting), fitting, self.drafter.method)
        if not made:
            return entries, num_runs
        return [e for e in entries if e.sequence not in made] + list(made.values()), num_runs + len(made)

    def measured(self, batch: Batch, seconds: float, *, borrowed: bool = False) -> None:
        """Note what a batch took, and what became of its drafts. borrowed: see StepCost.add."""
        if self.drafter is None or (self._rests and not batch.drafts):
            return
        for entry in batch.drafts:
            sequence, num_drafted, num_accepted = entry.sequence, len(entry.draft), entry.num_accepted
            self.drafter.verified(sequence, num_drafted, num_accepted)
            sequence.num_drafted += num_drafted
            sequence.num_accepted += num_accepted
        if batch.num_decodes + batch.num_runs == len(batch.entries) and not borrowed:
            self.drafter.measured(sum([e.num_new for e in batch.entries]), seconds)

    def ended(self, sequence: Sequence) -> None:
        if self.drafter is not None:
            self.drafter.ended(sequence)

    def _fitting(self, sequence: Sequence, draft: list[int]) -> list[int]:
        """Shorten a draft to what may follow the sequence and to the blocks that are free; allocate those."""
        return draft[: self._reserve(sequence, len(draft))]

    def _reserve(self, sequence: Sequence, num_tokens: int) -> int:
        """See Reserve."""
        block_size, table = self._block_size, sequence.block_table
        num_slots = (len(table) + self._manager.num_free) * block_size
        num_tokens = min(num_tokens, min(sequence.draft_end, num_slots) - sequence.num_tokens)
        num_needed = blocks_for(sequence.num_tokens + num_tokens, block_size) - len(table)
        if num_needed > 0:
            sequence.block_table += self._manager.allocate(num_needed)
        return num_tokens


def _may_draft(entry: ScheduledSequence) -> bool:
    """Return whether more than one token may follow. A sequence that is handed off stops with one token to compute."""
    sequence = entry.sequence
    return (
        sequence.request.speculates
        and sequence.handoff_id is None
        and sequence.provisional is None
        and sequence.draft_end > len(sequence.token_ids)
    )
