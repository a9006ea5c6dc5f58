"""The sequences that decode, and what each of them computes in the next step: one token, or what is left of a run.

    add ──> one token a step  <──────────────┐  ──> discard
                └─ forward: a grammar forced  ─> a run: several tokens, in one step if they fit
                   tokens, see Matcher.take_run

A run is as urgent as any decode: prompts wait for both. Where the settings have a budget of tokens, and the request
does not ask otherwise, a decode of one token attends to no more of a longer context (sparse attention). Pure
bookkeeping: blocks are the scheduler's.
"""

from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ..costs.step_cost import StepWork
from .sequence import KNOWN, Batch, ScheduledSequence, Sequence


class Decoding:
    """Ordered set of sequences. A step costs O(sequences) where none has a run, with a small constant: their entries
    stay from step to step."""

    def __init__(self, default_tpot_s: float) -> None:
        self.tpots = TightestTpot(default_tpot_s)
        self._entries: dict[Sequence, ScheduledSequence] = {}
        self._runs: dict[Sequence, None] = {}  # those with a run

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._entries

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._entries)

    def add(self, sequence: Sequence) -> None:
        self._entries[sequence] = ScheduledSequence(sequence, 1)
        self.tpots.add(sequence)
        if sequence.num_uncomputed > 1:
            self._runs[sequence] = None

    def forward(self, sequence: Sequence) -> None:
        """Note that a sequence, if it is among these, has got a run."""
        if sequence in self._entries:
            self._runs[sequence] = None

    def discard(self, sequence: Sequence) -> None:
        if self._entries.pop(sequence, None) is not None:
            self._runs.pop(sequence, None)
            self.tpots.remove(sequence)

    def rotate(self, num: int) -> None:
        """Move the first `num` to the end."""
        for sequence in list(self._entries)[:num]:
            self._entries[sequence] = self._entries.pop(sequence)

    def entries(self, limit: int, num_tokens: int) -> list[ScheduledSequence]:
        """Entries of the first `limit` sequences that do not wait for a peer, those with a run last. `num_tokens`: that
        they may compute; each computes one at least."""
        found = [entry for sequence, entry in self._entries.items() if not sequence.is_held][:limit]
        if not self._runs:
            return found
        for sequence in [s for s in self._runs if s.num_uncomputed <= 1]:
            del self._runs[sequence]
        num_spare = max(num_tokens - len(found), 0)
        runs: list[ScheduledSequence] = []
        for sequence in [entry.sequence for entry in found if entry.sequence in self._runs]:
            num_new = min(sequence.num_uncomputed, 1 + num_spare)
            num_spare -= num_new - 1
            runs.append(ScheduledSequence(sequence, num_new))
        return [entry for entry in found if entry.sequence not in self._runs] + runs

    def work(self) -> tuple[StepWork, int]:
        """Return the work of a step in which each computes one token, and the tokens that they have at their ends."""
        return StepWork(len(self._entries), sum([len(s.token_ids) for s in self])), sum([s.end for s in self])

    def num_runs(self, entries: list[ScheduledSequence]) -> int:
        """Number of these entries that are of runs."""
        return sum(entry.sequence in self._runs for entry in entries) if self._runs else 0


class TightestTpot:
    """The shortest time per output token that the sequences which decode were promised: a multiset of times. O(1), but
    to remove the last of the shortest: O(different times)."""

    def __init__(self, default_s: float) -> None:
        """`default_s`: of a sequence whose request names none."""
        self.least_s = default_s  # that value without sequences, too
        self._default_s = default_s
        self._counts: dict[float, int] = {}

    def add(self, sequence: Sequence) -> None:
        tpot_s = self._of(sequence)
        self.least_s = min(self.least_s, tpot_s) if self._counts else tpot_s
        self._counts[tpot_s] = self._counts.get(tpot_s, 0) + 1

    def remove(self, sequence: Sequence) -> None:
        tpot_s = self._of(sequence)
        self._counts[tpot_s] -= 1
        if not self._counts[tpot_s]:
            del self._counts[tpot_s]
            if tpot_s == self.least_s:
                self.least_s = min(self._counts, default=self._default_s)

    def _of(self, sequence: Sequence) -> float:
        tpot_s = sequence.request.level.tpot_s
        return self._default_s if tpot_s is None else tpot_s


@dataclass(frozen=True, slots=True)
class StepAhead:
    """The batch after one that is still computed."""

    batch: Batch
    growing: list[Sequence]  # that need a block more for it
    num_ending: int  # sequences that end with the batch before it


def decode_on(
    under_way: Batch, running: Collection[Sequence], block_size: int, most: int, *, somebody_waits: bool
) -> StepAhead | None:
    """Find the batch after one that is still computed, if all that it does is to decode on; None where a running
    sequence has other work. Sequences that came meanwhile, with their KV, join it, if it has at most `most` then.
    `somebody_waits`: for admission."""
    entries: list[ScheduledSequence] = []
    previous_entries: list[int] = []
    num_left = num_ending = 0
    for i, entry in enumerate(under_way.entries):
        sequence = entry.sequence
        if sequence not in running:
            continue  # it has ended since then
        if not sequence.input_from_previous or sequence.handoff_id is not None:
            return None
        is_decode = i < under_way.num_decodes
        if not is_decode and (not entry.samples or somebody_waits):
            return None  # who waits may share what this prompt has computed
        num_left += 1
        if sequence.provisional is not None:
            continue  # it waits for its peer once it has this token
        if len(sequence.token_ids) + 1 < sequence.end:
            entries.append(entry if is_decode else ScheduledSequence(sequence, 1))
            previous_entries.append(i)
        else:
            num_ending += 1
    if num_left < len(running):
        came = _that_came(under_way, running)
        if came is None or (came and len(entries) + len(came) > most):
            return None
        entries += came
        previous_entries += [KNOWN] * len(came)
    if not entries:
        return None
    # A sequence has a token more than is known, unless that one is its input.
    growing = [
        entry.sequence
        for entry, previous in zip(entries, previous_entries, strict=True)
        if len(entry.sequence.token_ids) + (previous != KNOWN) > len(entry.sequence.block_table) * block_size
    ]
    return StepAhead(Batch(entries, len(entries), previous_entries=previous_entries), growing, num_ending)


def _that_came(under_way: Batch, running: Collection[Sequence]) -> list[ScheduledSequence] | None:
    """Find the entries of running sequences that are not in the batch; None where one of them has other work than to
    decode. One that was begun before its source's answer, and waits for it, has none."""
    computed = {entry.sequence for entry in under_way.entries}
    came = [s for s in running if s not in computed and not (s.provisional is not None and s.is_held)]
    if all(s.is_decoding and s.num_uncomputed == 1 and s.input_from_previous and s.handoff_id is None for s in came):
        return [ScheduledSequence(s, 1) for s in came]
    return None


def work_of_decodes(entries: SequenceOf[ScheduledSequence], num_runs: int) -> StepWork:
    """The work of entries that decode, of which the last `num_runs` are of runs: each a decode with a chunk before."""
    work = StepWork(len(entries), sum([len(e.sequence.token_ids) for e in entries]))
    for entry in entries[len(entries) - num_runs :]:
        work = work.with_chunk(entry.sequence.num_computed, entry.num_new - 1)
    return work


def work_of(batch: Batch) -> StepWork:
    """The work of a batch; call it before what was computed is counted."""
    num_decoding = batch.num_decodes + batch.num_runs
    work = work_of_decodes(batch.entries[:num_decoding], batch.num_runs)
    for entry in batch.entries[num_decoding:]:
        work = work.with_chunk(entry.sequence.num_computed, entry.num_new)
    return work


def is_sparse(entry: ScheduledSequence) -> bool:
    """Return whether the entry, not yet recorded, decodes with part of its context."""
    sequence = entry.sequence
    return sequence.sparse_from <= sequence.num_computed and entry.num_new == 1 and sequence.is_decoding


def note_inexact(entries: SequenceOf[ScheduledSequence]) -> None:
    """Note which sequences have KV from here on that full attention would compute otherwise; call it before what was
    computed is counted."""
    for entry in entries:
        if is_sparse(entry):
            entry.sequence.num_exact = min(entry.sequence.num_exact, entry.sequence.num_computed)
