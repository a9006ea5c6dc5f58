"""ModelSpeculator: decides what each sequence of a step drafts where a model drafts, and learns from what came of it.

    depths:    how many passes of the draft's model pay, by what is usual -> ModelProposer.propose: one pass a token
    lengths:   how much of the drafts is verified, by how sure the model was of each token
    verified, measured:   how many tokens were accepted, how long passes and steps took

A step of n rows that verifies m of the tokens drafted in d passes of s sequences takes seconds(n + m) + d · pass(s),
and a little beside each token, which counts where a model is tiny.
Sequences whose drafts are not accepted do not draft; some are tried again, for at most `PROBE_SHARE` of the time. Where
steps are so short that to decide would take more than `DECIDING_SHARE` of the time, it is decided less often.
Knows no clock and no model, as Speculator. What a request predicts is drafted first.
"""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ..core.draft import Draft, ModelProposer
from ..core.drafting import Reserve
from ..core.sequence import Sequence
from .acceptance import Acceptance
from .lengths import choose_depths, choose_lengths
from .predicted import PredictedProposer
from .rest import Rest
from .row_cost import RowCost
from .speculator import (
    BESIDE_S,
    DECIDING_S,
    DECIDING_SEQUENCE_S,
    LEAST_GAIN,
    MOST_SAVED,
    PROBE_SHARE,
    TOKEN_S,
)

USUAL = 0.75  # chance that every drafted token is said to have before the model has computed it
DECIDING_SHARE = 0.005
SEQUENCE_S = 20e-6  # that the engine takes for each sequence's draft, beside `BESIDE_S` and `TOKEN_S`
FIRST_PASS = 0.25  # of a step's time that a pass is assumed to take before one was measured


@dataclass(frozen=True, slots=True)
class _MadeDraft:
    index: int  # in the step
    draft: Draft
    acceptance: Acceptance  # of whoever drafted it


class ModelSpeculator:
    """Drafter of the engine (workers/core/drafting.py). method: name of the proposer, for metrics; max_tokens: the most
    that a sequence drafts in a step; min_accept: tokens that are accepted with a smaller probability are not drafted.
    """

    def __init__(self, method: str, proposer: ModelProposer, max_tokens: int, min_accept: float = 0.0) -> None:
        self.method = method
        self._proposer, self._predicted = proposer, PredictedProposer()
        self._max_tokens = max_tokens
        self._min_accept = max(min_accept, LEAST_GAIN)
        self._steps, self._passes, self._beside = RowCost(), RowCost(), RowCost()  # the last two: by sequences
        self._usual = Acceptance()  # of tokens before they are drafted, all said to be USUAL
        self._sure, self._foretold = Acceptance(), Acceptance()  # of the model's drafts, and of predicted ones
        self._drafted: dict[str, _MadeDraft] = {}  # by sequence: its last draft, as long as it was made
        self._saved = 0.0  # steps' worth of time that probes may take
        self._since_refresh = 0  # steps with drafts
        self._rest = Rest()

    def rests(self) -> bool:
        """See Drafter."""
        return self._rest.takes_step()

    def draft(self, sequences: SequenceOf[Sequence], num_rows: int, room: int, reserve: Reserve) -> list[list[int]]:
        """See Drafter."""
        drafts: list[list[int]] = [[] for _ in sequences]
        room = min(room, self._steps.reach - num_rows)
        self._saved = min(self._saved + PROBE_SHARE, MOST_SAVED)
        if room <= 0 or not sequences or self._refreshes(num_rows):
            return drafts
        candidates = self._predictions(sequences)
        foretold = {each.index for each in candidates}
        wanted = self._wanted(sequences, foretold, num_rows, room, reserve)
        if wanted:
            made = self._proposer.propose([(sequences[i], depth) for i, depth in wanted])
            for seconds in made.pass_s:
                self._passes.add(len(wanted), seconds)
            self._beside.add(len(wanted), made.beside_s)
            pairs = zip(wanted, made.drafts, strict=True)
            candidates += [_MadeDraft(i, draft, self._sure) for (i, _), draft in pairs if draft]
        if not candidates:
            deciding_s = DECIDING_S + DECIDING_SEQUENCE_S * (len(sequences) - 1)
            num_steps = math.ceil(deciding_s / (DECIDING_SHARE * self._steps.seconds(num_rows))) - 1
            self._rest.begin(num_steps, len(sequences))
            self._saved = min(self._saved + num_steps * PROBE_SHARE, MOST_SAVED)
            self._steps.skip(num_steps)
            return drafts
        self._since_refresh += 1
        for candidate, length in zip(candidates, self._lengths(sequences, candidates, num_rows, room), strict=True):
            key = sequences[candidate.index].key
            drafts[candidate.index] = candidate.draft.token_ids[: min(length, room)]
            room -= len(drafts[candidate.index])
            self._drafted[key] = candidate
        return drafts

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """See Drafter."""
        candidate = self._drafted.pop(sequence.key, None)
        if candidate is None:
            return
        if candidate.acceptance is self._sure:
            self._proposer.verified(sequence, num_accepted)
            self._usual.add(sequence.key, sequence.num_tokens, [USUAL] * num_drafted, num_accepted)
        candidate.acceptance.add(sequence.key, sequence.num_tokens, candidate.draft.chances[:num_drafted], num_accepted)

    def measured(self, num_rows: int, seconds: float) -> None:
        """See Drafter."""
        self._steps.add(num_rows, seconds)

    def ended(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._drafted.pop(sequence.key, None)
        for proposer in (self._proposer, self._predicted):
            proposer.ended(sequence)
        for acceptance in (self._usual, self._sure, self._foretold):
            acceptance.ended(sequence.key)
        self._rest.shorten()

    def _refreshes(self, num_rows: int) -> bool:
        """Return whether this step has no drafts, so that the time without them is measured."""
        if not self._steps.is_old(num_rows, self._since_refresh):
            return False
        self._since_refresh = 0
        return True

    def _predictions(self, sequences: SequenceOf[Sequence]) -> list[_MadeDraft]:
        found: list[_MadeDraft] = []
        for index, sequence in enumerate(sequences):
            if sequence.request.prediction:
                draft = self._predicted.propose(sequence, self._max_tokens)
                if draft:
                    found.append(_MadeDraft(index, draft, self._foretold))
        return found

    def _wanted(
        self, sequences: SequenceOf[Sequence], foretold: set[int], num_rows: int, room: int, reserve: Reserve
    ) -> list[tuple[int, int]]:
        """Indices of the sequences for which the model drafts, and how many tokens."""
        able = [i for i, each in enumerate(sequences) if i not in foretold and self._proposer.may_draft(each)]
        if not able:
            return []
        said = [USUAL] * self._max_tokens
        chances = [self._usual.chances(sequences[i].key, said) for i in able]
        seconds = self._steps.table(num_rows, min(room, self._max_tokens * len(able)))
        pass_s, draft_s = self._pass_s(len(able), seconds[0]), self._draft_s(len(able))
        depths = choose_depths(chances, num_rows, seconds, pass_s, self._min_accept, draft_s)
        if not any(depths):
            depths = self._probes([sequences[i] for i in able], (draft_s + pass_s[1] + seconds[1]) / seconds[0] - 1)
        return [
            (i, fitting)
            for i, depth in zip(able, depths, strict=True)
            if depth and (fitting := reserve(sequences[i], depth)) > 0
        ]

    def _pass_s(self, most: int, step_s: float) -> list[float]:
        """Seconds of a pass of no sequence, of one, and so on up to `most`. step_s: of a step without drafts."""
        if math.isinf(self._passes.least_rows):
            passes = [FIRST_PASS * step_s] * most
        else:
            passes = self._passes.table(1, most - 1)
        return [0.0, *(seconds + TOKEN_S * n for n, seconds in enumerate(passes, 1))]

    def _draft_s(self, num_sequences: int) -> float:
        """Seconds that drafts of so many sequences take, beside their passes."""
        seconds = 0.0 if math.isinf(self._beside.least_rows) else self._beside.seconds(num_sequences)
        return BESIDE_S + SEQUENCE_S * num_sequences + seconds

    def _probes(self, sequences: SequenceOf[Sequence], cost: float) -> list[int]:
        """Depths of sequences that are not expected to pay, and are due, while there is time saved for it. cost: of a
        drafted token, in steps."""
        depths = [0] * len(sequences)
        for i, sequence in enumerate(sequences):
            if self._saved <= 0:
                break
            if self._usual.is_due(sequence.key, sequence.num_tokens):
                depths[i] = 1
                self._saved -= cost
        return depths

    def _lengths(
        self, sequences: SequenceOf[Sequence], candidates: SequenceOf[_MadeDraft], num_rows: int, room: int
    ) -> list[int]:
        """Choose how many tokens of each draft are verified; of a draft of one token, that one: it was to be tried."""
        chances = [each.acceptance.chances(sequences[each.index].key, each.draft.chances) for each in candidates]
        seconds = self._steps.table(num_rows, min(room, sum(map(len, chances))))
        lengths = choose_lengths(chances, num_rows, seconds, self._min_accept)
        return [max(length, len(each) == 1) for length, each in zip(lengths, chances, strict=True)]
