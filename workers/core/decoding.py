"""The sequences that decode, and what each of them computes in the next step: one token, or what is left of a run.

    add ──> one token a step  <──────────────┐  ──> discard
                └─ forward: a grammar forced  ─> a run: several tokens, in one step if they fit
                   tokens, see Matcher.take_run

A run is as urgent as any decode: prompts wait for both, and have what tokens and time of a step these leave
(StepTargets). Where the settings have a budget of tokens, and the request does not ask otherwise, a decode of one token
attends to no more of a longer context (sparse attention). Pure bookkeeping: blocks are the scheduler's.
"""

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ..common.request import Request
from ..costs.step_cost import Budget, StepCost, StepWork, target_s
from .scheduler_config import LEAST_PREFILL_TOKENS, SchedulerConfig
from .sequence import Batch, ScheduledSequence, Sequence


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
class StepTargets:
    """Times that steps and prompts may take, by what steps were measured to cost: as the scheduler has these now. It
    keeps none of them: each may be replaced (a simulated worker's cost is known, not measured)."""

    config: SchedulerConfig
    cost: StepCost
    decoding: Decoding
    prefill_budget: int  # prompt tokens beside decodes
    num_waiting_tokens: Callable[[], int]  # see Scheduler

    def slack_s(self, num_tokens: int, request: Request) -> float:
        """Time that a request with so many tokens to compute may wait until its first token is late, beside those that
        decode. What cannot come in time even alone waits like all others, and does not go before them."""
        own_s, usual_s = request.level.ttft_s, min(self.config.ttft_s, request.timeout_s)
        goal_s = usual_s if own_s is None else min(own_s, request.timeout_s)
        alone_s = self.cost.seconds(StepWork().with_chunk(0, num_tokens)) if self.cost.is_measured else 0.0
        if alone_s >= goal_s:
            return max(goal_s, usual_s)
        decodes, num_end = self.decoding.work()
        return goal_s - alone_s * self.cost.stretch(decodes, self._target_s(decodes, num_end))

    def budget(self, decodes: list[ScheduledSequence], num_runs: int, *, has_prompts: bool) -> Budget:
        """Return what a step's prompts may take beside these decodes, of which the last `num_runs` are of runs.
        has_prompts: some are under way, or may be admitted."""
        num_tokens = self.config.step_tokens - (sum([e.num_new for e in decodes]) if num_runs else len(decodes))
        if decodes:  # a prompt that stands here ends, though the budget be 0
            num_tokens = min(num_tokens, self.prefill_budget or LEAST_PREFILL_TOKENS)
        if not (decodes and has_prompts and self.cost.is_measured):
            return Budget(num_tokens, StepWork())
        work = work_of_decodes(decodes, num_runs)
        num_end = sum([e.sequence.end for e in decodes])
        return Budget(num_tokens, work, self._target_s(work, num_end))

    def _target_s(self, decodes: StepWork, num_end: int) -> float:
        """Time that a step with prompts beside these decodes may take, which have `num_end` tokens at their ends."""
        if not decodes.num_decodes:
            return math.inf
        if self.config.target_step_s is not None:
            return self.config.target_step_s or math.inf
        if self.prefill_budget >= self.config.step_tokens:
            return math.inf
        num_left = num_end - decodes.num_context
        return target_s(self.decoding.tpots.least_s, self.cost, decodes, self.num_waiting_tokens(), num_left)


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
        work = work.with_chunk(entry.start, entry.num_new)
    return work


def is_sparse(entry: ScheduledSequence) -> bool:
    """Return whether the entry, not yet recorded, decodes with part of its context."""
    sequence = entry.sequence
    return entry.num_new == 1 and sequence.sparse_from <= entry.start and sequence.is_decoding_from(entry.start)


def note_inexact(entries: SequenceOf[ScheduledSequence]) -> None:
    """Note which sequences have KV from here on that full attention would compute otherwise; call it before what was
    computed is counted."""
    for entry in entries:
        if is_sparse(entry):
            entry.sequence.num_exact = min(entry.sequence.num_exact, entry.sequence.num_computed)
