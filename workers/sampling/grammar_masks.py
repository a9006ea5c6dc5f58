"""Masks of the tokens that grammars and budgets of thoughts allow next, made on a thread of their own before the batch
is computed, or while it is.

    begin (with the launch of a step)  ->  the step's logits  ->  rows: waits if it must

A step that is launched before its last tokens are known (Batch.previous_entries) begins its masks once they are
recorded, while its logits are computed (InFlightStep.sample).

Where the batch is computed on the same cores, it waits for the masks at first: threads that compute together wait for
each other, so that a mask which takes one of their cores takes all of them, and for longer.

So the masks of one step are made at a time, in memory that is reused. No torch.
"""

import os
from collections.abc import Callable, Container
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from ..common.cores import bind_this_thread
from ..common.errors import InternalError
from ..core.sequence import DraftedRow, IsHere, SampledRow, Sequence, everybody
from ..grammar.matcher import Matcher

_MAX_THREADS = 8
FIRST_S = 0.01  # that a step which is computed on the same cores waits at first
MAX_S = 10.0  # for the masks of a step: about 100 us each, and limits.py bounds them
Masks = NDArray[np.int32]  # [rows, words]


@dataclass(frozen=True, slots=True)
class MaskRow:
    """One row, as it was when the step was launched."""

    matcher: Matcher  # of a drafted row, that of its sequence
    new_token_ids: list[int]
    banned: tuple[int, ...]  # unless the grammar allows nothing else
    may_run: bool = False  # several tokens may follow at once
    drafted: int | None = None  # token by which the row follows the one before it


class PendingMasks:
    """Masks of some rows of a step's logits."""

    def __init__(self, rows: list[int], made: "Future[Masks]", give_up: Callable[[], object]) -> None:
        """`give_up`: called where the masks are not made in time."""
        self.rows = rows  # ascending
        self._made, self._give_up = made, give_up

    def masks(self) -> Masks:
        """[rows, ceil(vocab / 32)]: bit i % 32 of word i // 32 is set where token i is allowed; valid until the next
        step's are begun. Waits until they are made. Raises InternalError where that takes MAX_S: the step fails, and
        its sequences resume in separate steps, so that one alone ends for it in the end."""
        try:
            return self._made.result(MAX_S)
        except TimeoutError as e:
            self._give_up()
            raise InternalError(f"the masks of a step's grammars were not made within {MAX_S:g} s") from e


class GrammarMasks:
    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        cores: SequenceOf[int] | None = None,
        *,
        first_s: float = 0.0,
    ) -> None:
        """cores: on which masks are made; None: any. first_s: how long `begin` waits for them at most."""
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self._cores, self._first_s = cores, first_s
        self._bits = np.empty((0, -(-vocab_size // 32)), dtype=np.int32)
        self._thread: ThreadPoolExecutor | None = None  # started with the first mask
        self._executor: LLExecutor | None = None

    def begin(self, sequences: SequenceOf[SampledRow], is_here: IsHere = everybody) -> PendingMasks | None:
        """Begin to make the masks of the rows' next tokens; None: none of them has a matcher. Drafted rows stand after
        those of their sequences, in order. What has left may get any token: its matcher may be at its end."""
        wanted = self.rows(sequences, is_here)
        if not wanted:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                1, "diptych-grammar", initializer=bind_this_thread, initargs=(self._cores,)
            )
        made = self._thread.submit(self.make, list(wanted.values()))
        if self._first_s:
            wait([made], self._first_s)
        return PendingMasks(list(wanted), made, self._give_up)

    def rows(self, sequences: SequenceOf[SampledRow], is_here: IsHere = everybody) -> dict[int, MaskRow]:
        """Read what the masks are made from, by row, of the rows with a matcher. Once a step."""
        drafting = {row.sequence for row in sequences if isinstance(row, DraftedRow)}
        return {
            i: self._row(row, drafting) if is_here(row.sequence) else MaskRow(Matcher.free(), [], ())
            for i, row in enumerate(sequences)
            if row.matcher is not None
        }

    def _give_up(self) -> None:
        """Leave what is being made to itself, with the memory that it writes."""
        self._thread = self._executor = None
        self._bits = np.empty((0, self._bits.shape[1]), dtype=np.int32)

    def _row(self, row: SampledRow, drafting: Container[Sequence]) -> MaskRow:
        """drafting: sequences with drafts, which get no runs besides."""
        matcher, sampling = row.matcher, row.request.sampling
        assert matcher is not None
        is_banning = row.num_output < sampling.min_tokens
        banned = (*self._eos_token_ids, *sampling.stop_token_ids) if is_banning else ()
        if isinstance(row, DraftedRow):
            return MaskRow(matcher, [], banned, drafted=row.drafted[-1])
        new = matcher.new_tokens(row.token_ids, row.num_prompt)
        # Each token of a run would have its own log-probability.
        return MaskRow(matcher, new, banned, may_run=sampling.logprobs is None and row.sequence not in drafting)

    def make(self, rows: list[MaskRow]) -> Masks:
        """Make the masks of one step, on the thread of this object."""
        if self._executor is None:
            self._executor = LLExecutor(min(len(os.sched_getaffinity(0)), _MAX_THREADS))
        if len(rows) > len(self._bits):
            self._bits = np.empty((1 << (len(rows) - 1).bit_length(), self._bits.shape[1]), dtype=np.int32)
        bits = self._bits[: len(rows)]
        matchers: list[Matcher] = []
        for row in rows:
            if row.drafted is not None:
                matchers.append(matchers[-1].after(row.drafted))
                continue
            row.matcher.consume(row.new_token_ids)
            if row.may_run:
                row.matcher.find_run()
            matchers.append(row.matcher)
        states = [(state, i) for i, matcher in enumerate(matchers) if (state := matcher.state) is not None]
        if states:
            fill_next_token_bitmask_par(self._executor, states, bits)
        for row, matcher, mask in zip(rows, matchers, bits, strict=True):
            if matcher.state is None or not matcher.check():
                mask.fill(-1)  # or its token is not used
            forced = matcher.forced
            if forced is not None and _allows(mask, forced):  # not within a character, for a grammar
                _only(mask, forced)
            elif row.banned:
                _ban(mask, row.banned)
        return bits


def _allows(mask: NDArray[np.int32], token_id: int) -> bool:
    return bool(mask[token_id // 32] >> (token_id % 32) & 1)


def _only(mask: NDArray[np.int32], token_id: int) -> None:
    mask.fill(0)
    mask.view(np.uint32)[token_id // 32] = np.uint32(1 << (token_id % 32))


def _ban(mask: NDArray[np.int32], token_ids: SequenceOf[int]) -> None:
    """Clear the bits of these tokens, unless no other is set."""
    words = mask.view(np.uint32)
    before = words.copy()
    for token_id in token_ids:
        words[token_id // 32] &= ~np.uint32(1 << (token_id % 32))
    if not words.any():
        words[:] = before
