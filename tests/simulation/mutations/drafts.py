"""Bugs to plant where drafts are verified: see mutations.py."""

from collections.abc import Sequence as SequenceOf

from diptych.workers.core import drafting
from diptych.workers.core.sequence import Batch, DraftedRow, DraftEntry, SampledToken, ScheduledSequence
from diptych.workers.engine.engine import Engine
from diptych.workers.grammar.matcher import Matcher

from .mutations import Replacement


def a_draft_is_accepted_with_one_token_too_many() -> list[Replacement]:
    real = DraftEntry.settle

    def settle(self: DraftEntry, sampled: SequenceOf[SampledToken]) -> SequenceOf[SampledToken]:
        kept = real(self, sampled)
        rest = sampled[len(kept) : len(kept) + 1]
        self.yielded.extend(token.token_id for token in rest)
        return [*kept, *rest]

    return [(DraftEntry, "settle", settle)]


def rejected_tokens_count_as_computed() -> list[Replacement]:
    real = Engine._advance

    def advance(self: Engine, batch: Batch, began: float) -> None:
        real(self, batch, began)
        for entry in batch.drafts:
            entry.sequence.num_computed += len(entry.draft) - entry.num_accepted

    return [(Engine, "_advance", advance)]


def the_noise_of_all_rows_is_that_of_the_first() -> list[Replacement]:
    return [(DraftedRow, "num_tokens", property(lambda self: self.sequence.num_tokens))]


def penalties_do_not_see_drafted_tokens() -> list[Replacement]:
    return [(DraftedRow, "token_ids", property(lambda self: self.sequence.token_ids))]


def what_is_handed_off_drafts_on() -> list[Replacement]:
    def may_draft(entry: ScheduledSequence) -> bool:
        return entry.sequence.end - entry.sequence.num_tokens > 1

    return [(drafting, "_may_draft", may_draft)]


def a_grammar_is_advanced_by_what_is_drafted() -> list[Replacement]:
    def after(self: Matcher, token_id: int) -> Matcher:
        self.consume([token_id])
        return self

    return [(Matcher, "after", after)]


DRAFTS = (
    a_draft_is_accepted_with_one_token_too_many,
    rejected_tokens_count_as_computed,
    the_noise_of_all_rows_is_that_of_the_first,
    penalties_do_not_see_drafted_tokens,
    what_is_handed_off_drafts_on,
    a_grammar_is_advanced_by_what_is_drafted,
)
