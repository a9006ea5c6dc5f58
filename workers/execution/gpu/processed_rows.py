"""The rows of a step that are not plain: what changes their logits, and who asks for log-probabilities. No torch.

A sequence with penalties has a slot, a row of counts on the device (see logits_processors.py). Its first step
counts all its tokens there, each later one those that are new, which go up with all else that a step changes: so a step
costs a sequence the same however long its context is. A sequence's tokens only ever grow in number. In a step that is
launched before its last token is known (Batch.previous_entries) the device counts that token: it has it.

Biases and bans go along each step, of the rows that have them alone: they are few, and change when min_tokens is
reached. So do the masks of rows that follow a grammar, which are made while the step's logits are computed.

A row that drafted tokens lead to has a slot for one step: a copy of its sequence's counts, to which those tokens are
added. What becomes of a draft does not matter to the sequence's own slot, which counts the tokens that it has.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...common.logit_bias import LogitBias
from ...common.request import SamplingParams
from ...core.sequence import KNOWN, DraftedRow, SampledRow, Sequence

_MULTIPLE = 16  # of the length of a list of counts or copies: one compiled kernel does for all
_MAX_AGE = 256  # steps: a sequence that was in none of this many is forgotten

Column = TypeVar("Column")


class Columns(NamedTuple, Generic[Column]):
    """Columns of a step of R rows: arrays on the host, then tensors on the device."""

    bias_starts: Column  # [R + 1] int32: see LogitsProcessors
    bias_ids: Column  # [B] int32
    biases: Column  # [B] float32
    count_rows: Column  # [R] int32: slots; -1: none
    repetition: Column  # [R] float32
    presence: Column  # [R] float64
    frequency: Column  # [R] float64
    fresh: Column  # [f] int64: slots to be cleared
    prompt_slots: Column  # [p] int32, -1: nothing
    prompt_ids: Column  # [p] int64: tokens that the prompt of each slot has
    output_slots: Column  # [o] int32, -1: nothing
    output_ids: Column  # [o] int64: tokens that the output of each slot has gained
    fed_slots: Column  # [m] int32, -1: nothing
    fed_rows: Column  # [m] int64: rows of the previous step whose tokens the output of each slot has gained, too
    copied_from: Column  # [c] int64: slots of sequences with drafts, once these are counted; -1: nothing
    copied_to: Column  # [c] int64: slots of drafted rows; -1: nothing
    drafted_slots: Column  # [d] int32, -1: nothing
    drafted_ids: Column  # [d] int64: drafted tokens that lead to the row of each slot
    mask_rows: Column  # [R] int32: numbers of the masks of rows that follow a grammar, in order; -1: none
    asking: Column  # [r] int64: rows that ask for log-probabilities


@dataclass(frozen=True, slots=True)
class Plan:
    columns: Columns[NDArray[Any]]
    has_processors: bool  # a row's logits
    has_copies: bool  # of counts, for drafted rows
    asking: list[int]
    num_top: int  # the most that one of those asks for


@dataclass(slots=True, eq=False)
class _Row:
    slot: int  # -1: it has no penalties
    step: int = 0  # that used it last
    num_counted: int = 0  # of its tokens
    bias_of: bool | None = None  # whether what follows bans what min_tokens does
    bias_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    biases: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))


class _Counted:
    """(slot, token) pairs of a step."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.ids: list[int] = []

    def add(self, slot: int, ids: SequenceOf[int]) -> None:
        self.slots += [slot] * len(ids)
        self.ids += ids

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        num_idle = -len(self.ids) % _MULTIPLE
        slots = np.array(self.slots + [-1] * num_idle, dtype=np.int32)
        return slots, np.array(self.ids + [0] * num_idle, dtype=np.int64)


class _Copied:
    """Counts that drafted rows begin with, and the tokens that are added to them."""

    def __init__(self) -> None:
        self.sources: list[int] = []
        self.slots: list[int] = []
        self.added = _Counted()

    def add(self, source: int, slot: int, drafted: SequenceOf[int]) -> None:
        self.sources.append(source)
        self.slots.append(slot)
        self.added.add(slot, drafted)

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
        idle = [-1] * (-len(self.slots) % _MULTIPLE)
        sources, slots = (np.array(of + idle, dtype=np.int64) for of in (self.sources, self.slots))
        return sources, slots, *self.added.arrays()


class ProcessedRows:
    def __init__(self, eos_token_ids: tuple[int, ...], num_slots: int) -> None:
        """Make a table of at most `num_slots` rows, the most that a step has."""
        self._eos_token_ids = eos_token_ids
        self._free = list(range(num_slots))
        self._rows: dict[Sequence, _Row] = {}
        self._step = 0

    def begin_step(self) -> None:
        """Forget who has not been seen for long: its memory is not ours."""
        self._step += 1
        if self._step % _MAX_AGE == 0:
            self._forget_before(self._step - _MAX_AGE)

    def forget(self) -> None:
        """Everybody."""
        self._forget_before(self._step + 1)

    def plan(
        self,
        sampled: SequenceOf[SampledRow],
        changed: SequenceOf[int],
        previous_rows: SequenceOf[int] = (),
        *,
        is_draft: bool = False,
    ) -> Plan:
        """changed: the rows whose logits are changed (has_logits_processors), ascending; a drafted row stands after its
        sequence's, or that stood in the step before. previous_rows: of each, where among the previous step's tokens its
        last one is, or KNOWN; empty: all are known. Counts what the sequences have gained: the plan must be carried out
        on the device, in the order in which plans are made. is_draft: nobody asks for log-probabilities or masks.
        """
        whose = [sampled[i] for i in changed]
        own = [row.sequence for row in whose if not isinstance(row, DraftedRow)]
        feeds = [previous_rows[i] for i in changed] if previous_rows else [KNOWN] * len(own)
        rows = of_own = self._rows_of(own, feeds)
        copied = _Copied()
        for row in whose:
            self._rows[row.sequence].step = self._step
        if len(own) < len(whose):
            rows = [
                self._drafted(row, copied) if isinstance(row, DraftedRow) else self._rows[row.sequence] for row in whose
            ]
            self._free += copied.slots  # for the next step, which the device computes after this one
        num_rows = len(sampled)
        lengths = np.zeros(num_rows + 1, dtype=np.int32)
        lengths[[i + 1 for i in changed]] = [len(row.bias_ids) for row in rows]
        count_rows = np.full(num_rows, -1, dtype=np.int32)
        count_rows[changed] = [row.slot for row in rows]
        fresh, prompt, output, fed = self._count(own, of_own, feeds)
        asking = [] if is_draft else [i for i, s in enumerate(sampled) if s.request.sampling.logprobs is not None]
        samplings = [s.request.sampling for s in sampled]
        columns = Columns[NDArray[Any]](
            np.cumsum(lengths, dtype=np.int32),
            np.concatenate([np.empty(0, np.int32), *(row.bias_ids for row in rows)]),
            np.concatenate([np.empty(0, np.float32), *(row.biases for row in rows)]),
            count_rows,
            np.array([s.repetition_penalty for s in samplings], dtype=np.float32),
            np.array([s.presence_penalty for s in samplings]),
            np.array([s.frequency_penalty for s in samplings]),
            np.array(fresh, dtype=np.int64),
            *prompt.arrays(),
            *output.arrays(),
            *fed.arrays(),
            *copied.arrays(),
            np.full(num_rows, -1, dtype=np.int32) if is_draft else _mask_rows(sampled),
            np.array(asking, dtype=np.int64),
        )
        num_top = max((samplings[i].logprobs or 0 for i in asking), default=0)
        return Plan(columns, bool(rows), bool(copied.slots), asking, num_top)

    def _rows_of(self, sequences: SequenceOf[Sequence], feeds: SequenceOf[int]) -> list[_Row]:
        here = [self._rows.get(sequence) for sequence in sequences]
        for row in here:
            if row is not None:
                row.step = self._step
        rows = [row or self._new_row(sequence) for row, sequence in zip(here, sequences, strict=True)]
        for row, sequence, feed in zip(rows, sequences, feeds, strict=True):
            self._follow(row, sequence.request.sampling, sequence.num_output + (feed != KNOWN))
        return rows

    def _new_row(self, sequence: Sequence) -> _Row:
        slot = self._take_slot() if is_penalised(sequence.request.sampling) else -1
        row = self._rows[sequence] = _Row(slot, self._step)
        return row

    def _drafted(self, drafted: DraftedRow, copied: _Copied) -> _Row:
        """Make the row of this step, and note what its counts are."""
        own = self._rows[drafted.sequence]
        row = replace(own, slot=-1 if own.slot < 0 else self._take_slot())
        if row.slot >= 0:
            copied.add(own.slot, row.slot, drafted.drafted)
        self._follow(row, drafted.request.sampling, drafted.num_output)
        return row

    def _take_slot(self) -> int:
        if not self._free:
            self._forget_before(self._step)
        return self._free.pop()

    def _follow(self, row: _Row, sampling: SamplingParams, num_output: int) -> None:
        """Set the biases that the token after so many has."""
        is_banning = num_output < sampling.min_tokens and not sampling.is_masked  # else its mask bans
        if row.bias_of is not is_banning:
            self._set_biases(row, sampling, is_banning)

    def _forget_before(self, step: int) -> None:
        """Forget sequences that no step from this one on has used. One that comes again is counted anew."""
        for sequence, row in list(self._rows.items()):
            if row.step < step:
                del self._rows[sequence]
                if row.slot >= 0:
                    self._free.append(row.slot)

    def _set_biases(self, row: _Row, sampling: SamplingParams, is_banning: bool) -> None:
        bias = sampling.bias
        row.bias_of = is_banning
        if is_banning:
            banned = dict.fromkeys((*self._eos_token_ids, *sampling.stop_token_ids), -np.inf)
            bias = LogitBias({**bias, **banned})
        row.bias_ids = np.array(bias.token_ids, dtype=np.int32)
        row.biases = np.array(bias.biases, dtype=np.float32)

    @staticmethod
    def _count(
        sequences: SequenceOf[Sequence], rows: SequenceOf[_Row], feeds: SequenceOf[int]
    ) -> tuple[list[int], _Counted, _Counted, _Counted]:
        """The slots that are new, and what prompts and outputs have gained, with rows of the previous step apart."""
        fresh: list[int] = []
        prompt, output, fed = _Counted(), _Counted(), _Counted()
        for sequence, row, feed in zip(sequences, rows, feeds, strict=True):
            if row.slot < 0:
                continue
            tokens, start = sequence.token_ids, row.num_counted
            assert start <= len(tokens), "a sequence has lost tokens"
            if not start:
                fresh.append(row.slot)
                start = sequence.num_prompt
                if sequence.request.sampling.repetition_penalty != 1.0:  # the others read only the output
                    prompt.add(row.slot, tokens[:start])
            output.add(row.slot, tokens[start:])
            fed.add(row.slot, [] if feed == KNOWN else [feed])
            row.num_counted = len(tokens) + (feed != KNOWN)
        return fresh, prompt, output, fed


def _mask_rows(sampled: SequenceOf[SampledRow]) -> NDArray[np.int32]:
    numbers, follows = np.full(len(sampled), -1, dtype=np.int32), [s.matcher is not None for s in sampled]
    numbers[follows] = np.arange(sum(follows))
    return numbers


def is_penalised(sampling: SamplingParams) -> bool:
    """Return whether the tokens so far change the logits of the next one."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
