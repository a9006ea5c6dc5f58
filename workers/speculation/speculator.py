"""Speculator: decides what each sequence of a step drafts, and learns from what came of it.

    draft:     which sequences could pay? -> their proposers' drafts -> calibrated chances -> lengths
    verified:  how many tokens of a draft were accepted   -> Acceptance
    measured:  how long a step of so many rows took       -> RowCost

Knows no clock and no model: times and acceptances come in, token ids go out, so a simulation can drive it. It costs
little where drafts do not pay: of a batch for which no draft could, no sequence is looked at, and a sequence whose
drafts are not accepted is not looked up. Both are tried again, for at most `PROBE_SHARE` of the time. Where steps are
so short that decisions would take more than `LOOKUP_SHARE` of the time, it rests for some steps after each against
drafts, and longer after several of those.
"""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from ..core.draft import Draft, Proposer
from ..core.drafting import Reserve
from ..core.sequence import Sequence
from .acceptance import MAX_CHANCE, Acceptance
from .lengths import choose_lengths
from .predicted import PredictedProposer
from .rest import Rest
from .row_cost import RowCost

PROBE_SHARE = 0.005  # of the time of steps, for drafts that are not expected to pay
MOST_SAVED = 2.0  # steps' worth of that, at most kept for later
LEAST_GAIN = 0.01  # chance of acceptance below which no draft is made, however little rows cost
# That a decision takes of one sequence, and longer of each other one, whatever it gives. A step has emptied the caches
# before, so that it takes several times as long as in a loop, and so does what of the engine it displaces there.
DECIDING_S, DECIDING_SEQUENCE_S = 100e-6, 25e-6
# What the engine takes for drafts beside rows, and passes of a model: for a step that has any, for each token. About
# twice what a quiet processor takes: drafts that are rare, or made on a busy one, find nothing in its caches.
BESIDE_S, TOKEN_S = 120e-6, 30e-6
LOOKUP_SHARE = 0.01
FRUITLESS = 4  # decisions against drafts, one after the other, after which they are as many times as rare
MOST_IDLE = 16  # steps until the next decision then, if the share alone does not ask for more
LEAST_PROBE = 0.001  # of a step: time that a draft takes beside its rows


@dataclass(slots=True)
class _Method:
    """A proposer, and how its drafts fare."""

    proposer: Proposer
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(frozen=True, slots=True)
class _Candidate:
    index: int  # in the step
    method: _Method
    draft: Draft
    chances: list[float]  # calibrated


class Speculator:
    """Drafter of the engine (workers/core/drafting.py). method: name of the proposer, for metrics; max_tokens: the most
    that a sequence drafts in a step; min_accept: tokens that are accepted with a smaller probability are not drafted.
    """

    def __init__(self, method: str, proposer: Proposer, max_tokens: int, min_accept: float = 0.0) -> None:
        self.method = method
        self._method = _Method(proposer)
        self._predicted = _Method(PredictedProposer())  # asked first, where a request has a prediction
        self._max_tokens = max_tokens
        self._min_accept = max(min_accept, LEAST_GAIN)
        self._cost = RowCost()
        # By sequence: who made its last draft, and the chances that it gave.
        self._said: dict[str, tuple[_Method, list[float]]] = {}
        self._next_lookup: dict[str, int] = {}  # by sequence, for which one gave nothing: at how many tokens
        self._saved = 0.0  # steps' worth of time that probes may take
        self._since_refresh = 0  # steps with drafts
        self._rest = Rest()
        self._num_fruitless = 0  # decisions against drafts since one for them

    def rests(self) -> bool:
        """Return whether no sequence is to be looked up in this step; once a step, before `draft`."""
        return self._rest.takes_step()

    def draft(
        self, sequences: SequenceOf[Sequence], num_rows: int, room: int, reserve: Reserve | None = None
    ) -> list[list[int]]:
        """Drafts of sequences that each decode one token; empty where none pays. num_rows: rows of the step without
        drafts, these sequences' and others'; room: the most draft tokens altogether. reserve: not called."""
        drafts: list[list[int]] = [[] for _ in sequences]
        room = min(room, self._cost.reach - num_rows)
        self._saved = min(self._saved + PROBE_SHARE, MOST_SAVED)
        if room <= 0 or not sequences:
            return drafts
        # Of a step, what deciding takes: it is a part of what drafts cost, for without them the drafter rests.
        deciding = (DECIDING_S + DECIDING_SEQUENCE_S * (len(sequences) - 1)) / self._cost.seconds(num_rows)
        wait = math.ceil(deciding / LOOKUP_SHARE)  # tokens
        least = max(self._cost.least_gain(num_rows, room, deciding), self._min_accept)
        if least >= MAX_CHANCE:
            self._decline(deciding, len(sequences))
            return drafts
        if self._refreshes(num_rows):
            return drafts
        candidates = self._candidates(sequences, least, num_rows, wait)
        if not candidates:
            self._decline(deciding, len(sequences))
            return drafts
        without, *more = self._cost.table(num_rows, min(room, sum(len(each.chances) for each in candidates)))
        beside_s = deciding * without + BESIDE_S
        seconds = [without, *(each + beside_s + TOKEN_S * n for n, each in enumerate(more, 1))]
        lengths = choose_lengths([each.chances for each in candidates], num_rows, seconds, self._min_accept)
        pays = any(lengths)
        self._since_refresh += pays
        self._num_fruitless *= not pays
        self._add_probes(sequences, candidates, lengths, room, seconds[1] / seconds[0] - 1)
        if not any(lengths):
            self._decline(deciding, len(sequences))
            return drafts
        for candidate, length in zip(candidates, lengths, strict=True):
            sequence = sequences[candidate.index]
            if length:
                drafts[candidate.index] = candidate.draft.token_ids[:length]
                self._said[sequence.key] = candidate.method, candidate.draft.chances
            elif wait > 1:
                self._next_lookup[sequence.key] = sequence.num_tokens + wait
        return drafts

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn from a verified draft, of which the caller may have left out the end."""
        method, said = self._said.pop(sequence.key, (self._method, []))
        if said and num_drafted:
            method.acceptance.add(sequence.key, sequence.num_tokens, said[:num_drafted], num_accepted)

    def step_s(self, num_rows: int) -> float:
        """Seconds of a step of so many rows, as far as is known."""
        return self._cost.seconds(num_rows)

    def measured(self, num_rows: int, seconds: float) -> None:
        """Learn from a step of nothing but decodes; num_rows: with drafts."""
        self._cost.add(num_rows, seconds)

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that left this worker."""
        self._said.pop(sequence.key, None)
        self._next_lookup.pop(sequence.key, None)
        for method in (self._method, self._predicted):
            method.proposer.ended(sequence)
            method.acceptance.ended(sequence.key)
        self._rest.shorten()

    def _decline(self, deciding: float, num_sequences: int) -> None:
        """Look nothing up in the next steps. deciding: of a step, what a decision takes."""
        self._num_fruitless += 1
        num_steps = math.ceil(deciding / LOOKUP_SHARE)
        if self._num_fruitless > FRUITLESS:
            num_steps = max(num_steps, min(round(FRUITLESS * deciding / LOOKUP_SHARE), MOST_IDLE))
        num_steps -= 1
        self._rest.begin(num_steps, num_sequences)
        self._saved = min(self._saved + num_steps * PROBE_SHARE, MOST_SAVED)
        self._cost.skip(num_steps)

    def _refreshes(self, num_rows: int) -> bool:
        """Return whether this step has no drafts, so that the time without them is measured again."""
        if not self._cost.is_old(num_rows, self._since_refresh):
            return False
        self._since_refresh = 0
        return True

    def _candidates(self, sequences: SequenceOf[Sequence], least: float, num_rows: int, wait: int) -> list[_Candidate]:
        """Drafts of the sequences that could pay, and of some that are only tried. wait: tokens between look-ups that
        give nothing."""
        found: list[_Candidate] = []
        methods, saved = (self._method,), self._saved
        for index, sequence in enumerate(sequences):
            if wait > 1 and sequence.num_tokens < self._next_lookup.get(sequence.key, 0):
                continue
            for method in (self._predicted, self._method) if sequence.request.prediction else methods:
                acceptance = method.acceptance
                if acceptance.best_chance(sequence.key) < least:
                    if saved <= 0 or not acceptance.is_due(sequence.key, sequence.num_tokens):
                        continue
                    saved -= 1 / num_rows
                draft = method.proposer.propose(sequence, self._max_tokens)
                if draft:
                    chances = acceptance.chances(sequence.key, draft.chances)
                    found.append(_Candidate(index, method, draft, chances))
                    break
            else:
                if wait > 1:
                    self._next_lookup[sequence.key] = sequence.num_tokens + wait
        return found

    def _add_probes(
        self,
        sequences: SequenceOf[Sequence],
        candidates: SequenceOf[_Candidate],
        lengths: list[int],
        room: int,
        cost: float,
    ) -> None:
        """Lengthen to 1 what is not expected to pay and is due, while there is time saved for it. cost: of a row, in
        steps."""
        left = room - sum(lengths)
        for i, (candidate, length) in enumerate(zip(candidates, lengths, strict=True)):
            if self._saved <= 0 or left <= 0:
                return
            sequence = sequences[candidate.index]
            if not length and candidate.method.acceptance.is_due(sequence.key, sequence.num_tokens):
                lengths[i] = 1
                left -= 1
                self._saved -= max(cost, LEAST_PROBE)
