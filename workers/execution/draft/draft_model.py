"""DraftModel: drafts with a smaller model of the same vocabulary (Leviathan et al. 2023; method `draft`), or with the
target's own layers without some of them (Zhang et al. 2024, Draft & Verify; method `self`).

    a prompt's chunk   target computes it, then the draft: the KV of both is in the same blocks, and handed off together
    propose            pass 1: the tokens that the draft has not computed yet, at least the last one; samples one
                       pass 2 ..: the token that was drafted before; samples the next
    verified           drafted tokens that were accepted stay computed; what follows them is written over

Tokens are drafted as the target samples them: with the noise of their own positions, and with penalties and biases.
So where the two models agree, drafts are accepted at any temperature. Grammars are left to the verification. If the
draft's KV of some tokens is missing (they came from a worker without this draft, or were decoded without drafts), the
first pass computes it anew, at most `MOST_ANEW` tokens of a sequence in a step.

The target's own layers have no KV of their own: they read what the target stored, and write where it will write.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from ...core.draft import NO_DRAFT, Draft, ModelDrafts
from ...core.draft_kv import DraftKV
from ...core.sequence import Batch, DraftedRow, SampledRow, ScheduledSequence, Sequence
from ..common.backend import StepDecoder
from ..common.draft_rows import DraftPasses, DraftRows
from .draft_steps import DraftTables, Rows

MOST_ANEW = 512
FEW = 2  # new tokens of a sequence in a pass whose time is usual


class DraftModel:
    """A ModelProposer."""

    def __init__(self, decoder: StepDecoder, block_size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: gives seconds."""
        self._decoder, self._block_size, self.clock = decoder, block_size, clock
        self._kv: DraftKV | None = None
        self._num_written: dict[str, int] = {}  # by sequence: drafted tokens whose KV the last draft left
        self.num_anew = 0

    def attach(self, kv: DraftKV | None) -> None:
        self._kv = kv

    def may_draft(self, sequence: Sequence) -> bool:
        return True

    def computed(self, batch: Batch) -> None:
        """Compute the draft's KV of what a batch computed of prompts; before it is counted."""
        num_steady = batch.num_decodes + batch.num_runs
        if num_steady < len(batch.entries):
            self._compute(batch.entries[num_steady:])

    @torch.inference_mode()
    def _compute(self, prompts: SequenceOf[ScheduledSequence]) -> None:
        assert self._kv is not None
        for entry in prompts:
            sequence, end = entry.sequence, entry.sequence.num_computed + entry.num_new
            if not sequence.request.speculates or sequence.pooling is not None:
                continue
            self.num_anew += max(sequence.num_computed - sequence.num_draft_computed, 0)
            while (start := sequence.num_draft_computed) < end:
                self._catch_up(sequence, min(start + MOST_ANEW, end) if start < sequence.num_computed else end)

    @torch.inference_mode()
    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        drafts = {sequence.key: Draft([], []) for sequence, _ in wanted}
        pass_s: list[float] = []
        active = [each for each in wanted if self._is_near(each[0])]
        tables = DraftTables([s for s, _ in active], self._block_size) if active else None
        num_drafted = 0
        if (passes := self._decoder.passes) is not None and active:
            pass_s = self._chained(passes, active, drafts)
            active = []
        while active and tables is not None:
            began = self.clock()
            rows = self._rows(active, num_drafted, drafts)
            logits = self._decoder.compute(tables.step(rows))
            assert logits is not None
            self._sample(rows, logits, drafts)
            if max(rows.num_new) <= FEW:
                pass_s.append(self.clock() - began)
            num_drafted += 1
            active = [each for each in active if each[1] > num_drafted]
        return ModelDrafts([drafts[s.key] if drafts[s.key] else NO_DRAFT for s, _ in wanted], pass_s)

    def _chained(
        self, passes: DraftPasses, active: SequenceOf[tuple[Sequence, int]], drafts: dict[str, Draft]
    ) -> list[float]:
        """Have all passes computed one after the other. Adds to the drafts; returns seconds of each pass."""
        longest_first = sorted(active, key=lambda each: -each[1])
        sequences, depths = [of for of, _ in longest_first], [depth for _, depth in longest_first]
        room = passes.max_rows - len(sequences)
        for sequence in sequences:
            num_missing = sequence.num_computed - self._start(sequence)
            if num_missing > min(room, FEW - 1):
                self._catch_up(sequence, sequence.num_computed)
            else:
                room -= num_missing
        began, starts = self.clock(), [self._start(sequence) for sequence in sequences]
        new = [of.token_ids[start:] for of, start in zip(sequences, starts, strict=True)]
        for sequence, draft in zip(sequences, passes.draft(DraftRows(sequences, starts, new, depths)), strict=True):
            self._advance(sequence, sequence.num_tokens)
            self._num_written[sequence.key] = len(draft.token_ids) - 1
            drafts[sequence.key] = draft
        return [(self.clock() - began) / depths[0]] * depths[0]

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        num_written = self._num_written.pop(sequence.key, 0)
        self._advance(sequence, sequence.num_tokens + min(num_accepted, num_written))

    def ended(self, sequence: Sequence) -> None:
        self._num_written.pop(sequence.key, None)

    def close(self) -> None:
        if self._decoder.passes is not None:
            self._decoder.passes.close()

    def _is_near(self, sequence: Sequence) -> bool:
        """Return whether its KV is there but for a few tokens; compute more of what is missing, if not."""
        num_missing = sequence.num_computed - self._start(sequence)
        if num_missing > FEW:
            self.num_anew += min(num_missing, MOST_ANEW)
        if num_missing <= MOST_ANEW:
            return True
        self._catch_up(sequence, sequence.num_draft_computed + MOST_ANEW)
        return False

    def _catch_up(self, sequence: Sequence, end: int) -> None:
        """Compute the draft's KV of a sequence's tokens up to `end`, and sample nothing."""
        assert self._kv is not None
        start = sequence.num_draft_computed
        rows = Rows([sequence], [start], [sequence.token_ids[start:end]], [])
        self._decoder.compute(DraftTables([sequence], self._block_size).step(rows))
        self._kv.advance(sequence, end)

    def _start(self, sequence: Sequence) -> int:
        """Position of the first token that the draft has not computed."""
        return sequence.num_computed if self._kv is None else sequence.num_draft_computed

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        if self._kv is not None:
            self._kv.advance(sequence, num_tokens)

    def _rows(self, active: SequenceOf[tuple[Sequence, int]], num_drafted: int, drafts: dict[str, Draft]) -> Rows:
        """Rows of the next pass: of the first, what is not computed yet; sequences with one new token come first."""
        sequences = [sequence for sequence, _ in active]
        if num_drafted:
            starts = [s.num_tokens + num_drafted - 1 for s in sequences]
            token_ids = [drafts[s.key].token_ids[-1:] for s in sequences]
        else:
            sequences.sort(key=lambda s: s.num_tokens - self._start(s) > 1)
            starts = [self._start(s) for s in sequences]
            token_ids = [s.token_ids[start:] for s, start in zip(sequences, starts, strict=True)]
        sampled: list[SampledRow] = [DraftedRow(s, [*drafts[s.key].token_ids]) if num_drafted else s for s in sequences]
        return Rows(sequences, starts, token_ids, sampled)

    def _sample(self, rows: Rows, logits: Tensor, drafts: dict[str, Draft]) -> None:
        """logits: [R, vocab] float32, of the rows, changed. Adds the token of each to its draft."""
        sampler = self._decoder.sampler
        sums, likeliest, best = sampler.logsumexp_top_k(logits, 1)
        chances = (best[:, 0] - sums).exp().tolist()
        if sampler.is_argmax(rows.sampled, with_masks=False):
            token_ids = likeliest[:, 0].tolist()
        else:
            token_ids = [token.token_id for token in sampler.sample(logits, rows.sampled)]
        for sequence, token_id, chance in zip(rows.sequences, token_ids, chances, strict=True):
            draft = drafts[sequence.key]
            if not draft:
                self._advance(sequence, sequence.num_tokens)
            self._num_written[sequence.key] = len(draft.token_ids)
            draft.token_ids.append(token_id)
            draft.chances.append(chance)
