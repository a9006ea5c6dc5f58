"""Bugs to plant where drafts are verified: see mutations.py."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

from diptych.workers.core import drafting
from diptych.workers.core.draft_kv import DraftKV
from diptych.workers.core.sequence import Batch, DraftedRow, DraftEntry, SampledToken, ScheduledSequence, Sequence
from diptych.workers.engine.engine import Engine
from diptych.workers.grammar.matcher import Matcher
from diptych.workers.handoff.source_machine import SourceHandoff
from diptych.workers.kv.layout import KVLayout

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


def a_sink_believes_that_the_drafts_kv_came() -> list[Replacement]:
    real = DraftKV.received

    def received(self: DraftKV, sequence: Sequence, num_held: int, num_draft_computed: int) -> None:
        real(self, sequence, num_held, sequence.num_computed)

    return [(DraftKV, "received", received)]


def marks_of_a_draft_survive_the_reuse_of_a_block() -> list[Replacement]:
    return [(DraftKV, "has", lambda self, block: self._marks[block] > 0)]


def a_cached_prefix_counts_as_drafted() -> list[Replacement]:
    def found(self: DraftKV, sequence: Sequence) -> None:
        sequence.num_draft_computed = sequence.num_computed // self._block_size * self._block_size

    return [(DraftKV, "found", found)]


def a_block_that_the_cache_replaced_counts_as_drafted() -> list[Replacement]:
    return [(DraftKV, "replaced", lambda *_: None)]


def a_seal_counts_all_tokens_as_drafted() -> list[Replacement]:
    real = SourceHandoff.seal

    def seal(self: SourceHandoff, num_computed: int, *args: Any) -> Any:
        return real(self, num_computed, *args[:2], num_computed)

    return [(SourceHandoff, "seal", seal)]


def another_draft_counts_as_the_same() -> list[Replacement]:
    real = KVLayout.num_common_layers
    return [(KVLayout, "num_common_layers", lambda self, peer: real(self, replace(peer, draft_id=self.draft_id)))]


DRAFT_KV = (
    a_sink_believes_that_the_drafts_kv_came,
    marks_of_a_draft_survive_the_reuse_of_a_block,
    a_cached_prefix_counts_as_drafted,
    a_block_that_the_cache_replaced_counts_as_drafted,
    a_seal_counts_all_tokens_as_drafted,
    another_draft_counts_as_the_same,
)
DRAFTS = (
    a_draft_is_accepted_with_one_token_too_many,
    rejected_tokens_count_as_computed,
    the_noise_of_all_rows_is_that_of_the_first,
    penalties_do_not_see_drafted_tokens,
    what_is_handed_off_drafts_on,
    a_grammar_is_advanced_by_what_is_drafted,
)
