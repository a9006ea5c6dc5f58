"""HeadDraft: drafts with a head that reads the target's hidden states (EAGLE-3, Li et al. 2025, arXiv 2503.01840; MTP,
DeepSeek-V3, arXiv 2412.19437, section 2.2; methods `eagle3` and `mtp`).

The head's entry at position i has the embedding of token i + 1 and the hidden state of token i (head_spec.py). So:

    a step of the target   leaves hidden states of what it computed; those whose next token is known become entries at
                           once where a prompt is computed, and else at the next draft
    propose                pass 1: the entries up to the last token, from the target's hidden states; drafts one token
                           pass 2 ..: an entry of the token just drafted and of the head's own output; drafts the next
                           (where the likeliest tokens are drafted, whoever computes passes may do all of them at once)
    verified               nothing: entries of drafted tokens are computed again, from the target's hidden states
    seal                   the entries of all tokens that are computed: no hidden state travels with a hand-off

`Sequence.num_draft_computed` counts entries. Hidden states that were never seen here (of blocks from a cache or a
worker without this head) cannot be made again: their sequence is not drafted for. Of a block that sequences share, the
last entry has the next token of the one that made it: it may mislead the drafts of the others a little (vLLM computes
the last shared block anew instead).
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.draft import NO_DRAFT, Draft, ModelDrafts
from ...core.draft_kv import DraftKV
from ...core.sequence import Batch, DraftedRow, DraftEntry, Sequence
from ...models.heads.passes import PassOutput
from ...models.heads.vocabulary_map import DraftVocabulary
from ...models.layers.hidden_states import HiddenStates
from ...sampling.sampler import Sampler
from ..common.backend import MadePasses
from ..common.draft_rows import DraftRows, HeadPasses
from .draft_steps import DraftTables, Rows

# New entries of a sequence in a pass whose time is usual: what a step leaves, all of whose drafts are right. More are
# made before: they are of steps that drafted nothing.
USUAL = 9
# Hidden states of a sequence that is not drafted for: more become entries. Where they are small, more may wait: an
# answer of usual length that never drafts costs no entry.
MOST_WAITING, MOST_WAITING_BYTES = 64, 1 << 20


class _Waiting:
    """Hidden states of a sequence's tokens from position `start` to `end`, which are no entries yet."""

    __slots__ = ("_firsts", "_lasts", "_of", "end", "most", "start")

    def __init__(self, start: int, row_bytes: int) -> None:
        self.start = self.end = start
        self.most = max(MOST_WAITING, MOST_WAITING_BYTES // row_bytes)
        # Of [any, A] each, the rows from one to another: apart, so that nothing is made that collectors must look at.
        self._of: list[Tensor] = []
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    @property
    def num(self) -> int:
        return self.end - self.start

    def add(self, of: Tensor, first: int, num: int) -> None:
        """Add `num` rows of [any, A]. O(1), and no tensor is made: most of them are never looked at again."""
        self.end += num
        if self._lasts and self._lasts[-1] == first and self._of[-1] is of:
            self._lasts[-1] = first + num
            return
        self._of.append(of)
        self._firsts.append(first)
        self._lasts.append(first + num)

    def entered(self, num: int) -> None:
        """Remove the first `num`."""
        num_left = self.num - num
        # A copy: the others' memory may be a whole chunk's.
        self._of = [torch.cat(self.rows())[num:].clone()] if num_left else []
        self._firsts, self._lasts = ([0], [num_left]) if num_left else ([], [])
        self.start += num

    def rows(self) -> list[Tensor]:
        """[n, A] each, in order."""
        return [of[first:last] for of, first, last in zip(self._of, self._firsts, self._lasts, strict=True)]


@dataclass(slots=True)
class _Drafting:
    """A sequence while a draft of it is made."""

    sequence: Sequence
    depth: int
    draft: Draft
    hidden: Tensor | None = None  # [1, H]: the head's output of its last entry


class HeadDraft:
    """A ModelProposer."""

    def __init__(
        self,
        passes: MadePasses,
        taken: HiddenStates,
        vocabulary: DraftVocabulary,
        block_size: int,
        sampler: Sampler,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """taken: what the target's steps leave. block_size: of the KV cache. sampler:
        knows no grammars. clock: gives seconds."""
        self._passes, self._device = passes.host, passes.device
        self._taken, self._vocabulary = taken, vocabulary
        self._sampler, self.clock, self._block_size = sampler, clock, block_size
        self._kv: DraftKV | None = None
        self._waiting: dict[str, _Waiting] = {}
        self.num_anew = 0  # none can be

    def attach(self, kv: DraftKV | None) -> None:
        self._kv = kv
        if kv is not None:
            kv.on_seal = self.seal

    def may_draft(self, sequence: Sequence) -> bool:
        """Return whether the hidden states of all tokens that are no entries yet are here, at least of the last."""
        waiting = self._waiting.get(sequence.key)
        if waiting is None or waiting.start != sequence.num_draft_computed:
            return False
        return waiting.num > 0 and waiting.end == sequence.num_computed

    def computed(self, batch: Batch) -> None:
        """Take the hidden states of a step's tokens; before they are counted. It is called once a step: what is done of
        each sequence is little."""
        (rows, first), waitings = self._taken.place, self._waiting
        num_steady = batch.num_decodes + batch.num_runs
        prompts = {entry.sequence for entry in batch.entries[num_steady:]} if num_steady < len(batch.entries) else ()
        for entry in self._taken.entries:
            sequence, num = entry.sequence, entry.num_new
            waiting = waitings.get(sequence.key)
            if waiting is None or waiting.end != sequence.num_computed or waiting.start != sequence.num_draft_computed:
                waiting = self._begin(sequence, rows)
            if waiting is not None:
                # Those after tokens that were not accepted are of other texts.
                waiting.add(rows, first, len(entry.yielded) if type(entry) is DraftEntry else num)
                if waiting.end - waiting.start > waiting.most or sequence in prompts:
                    self._enter(sequence, waiting)
            first += num

    def seal(self, sequence: Sequence) -> None:
        """Compute the entries of all tokens that are computed: their sequence is about to be handed off."""
        if self.may_draft(sequence):
            self._enter(sequence, self._waiting[sequence.key])

    @torch.inference_mode()
    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        for sequence, _ in wanted:
            waiting = self._waiting[sequence.key]
            if waiting.num > USUAL:
                self._enter(sequence, waiting, num_kept=1)
        if self._device is not None:
            return self._chained(self._device, wanted)
        drafting = [_Drafting(sequence, depth, Draft([], [])) for sequence, depth in wanted]
        tables = DraftTables([of.sequence for of in drafting], self._block_size)
        times = self._greedy(drafting, tables)
        if times is None:
            times = self._one_by_one(drafting, tables), 0.0
        return ModelDrafts([of.draft or NO_DRAFT for of in drafting], *times)

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        """Do nothing: entries of drafted tokens do not count."""

    def ended(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence.key, None)

    def close(self) -> None:
        if self._device is not None:
            self._device.close()

    def _begin(self, sequence: Sequence, rows: Tensor) -> _Waiting | None:
        """Return what the hidden states of a sequence's next tokens are added to; None: it is not drafted for, or a
        token before them lacks its own. rows: [any, A]."""
        start = sequence.num_computed
        if not sequence.request.speculates or sequence.pooling is not None or start != sequence.num_draft_computed:
            self._waiting.pop(sequence.key, None)
            return None
        waiting = self._waiting[sequence.key] = _Waiting(start, rows.stride(0) * rows.element_size())
        return waiting

    @torch.inference_mode()
    def _enter(self, sequence: Sequence, waiting: _Waiting, num_kept: int = 0) -> None:
        """Make entries of the waiting hidden states whose next token is known, but for the last `num_kept`."""
        end = min(waiting.end - num_kept, sequence.num_tokens - 1)
        num = end - waiting.start
        if num <= 0:
            return
        rows = Rows([sequence], [waiting.start], [sequence.token_ids[waiting.start + 1 : end + 1]], [])
        step = DraftTables([sequence], self._block_size).step(rows)

        def work() -> None:
            self._passes.store(step, _joined(waiting.rows())[:num])
            self._entered(sequence, waiting, num)

        if self._device is not None:
            self._device.run(work)
        else:
            work()

    def _chained(self, passes: HeadPasses, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        """Have all passes computed one after the other."""
        longest_first = sorted(wanted, key=lambda each: -each[1])
        sequences, depths = [of for of, _ in longest_first], [depth for _, depth in longest_first]
        waiting, room = [self._waiting[of.key] for of in sequences], passes.max_rows - len(sequences)
        for sequence, of in zip(sequences, waiting, strict=True):
            if of.num - 1 > room:
                self._enter(sequence, of, num_kept=1)
            room -= of.num - 1
        began = self.clock()
        ids = [s.token_ids[w.start + 1 : w.end + 1] for s, w in zip(sequences, waiting, strict=True)]
        made = passes.draft(
            DraftRows(sequences, [of.start for of in waiting], ids, depths), [of.rows() for of in waiting]
        )
        for sequence, of in zip(sequences, waiting, strict=True):
            self._entered(sequence, of, of.num)
        drafts = {sequence.key: draft for sequence, draft in zip(sequences, made, strict=True)}
        pass_s = [(self.clock() - began) / depths[0]] * depths[0]
        return ModelDrafts([drafts[sequence.key] for sequence, _ in wanted], pass_s)

    def _entered(self, sequence: Sequence, waiting: _Waiting, num: int) -> None:
        assert self._kv is not None
        waiting.entered(num)
        self._kv.advance(sequence, waiting.start)

    def _greedy(self, drafting: list[_Drafting], tables: DraftTables) -> tuple[list[float], float] | None:
        """Draft the likeliest tokens in one call. Returns the seconds of each pass, and of what is beside them; None:
        that is not an option, and nothing was done."""
        if not self._sampler.is_argmax([of.sequence for of in drafting], with_masks=False):
            return None
        began = self.clock()
        active = sorted(drafting, key=lambda of: -of.depth)
        depth = active[0].depth
        rows, aux = self._new_entries(active)
        num_active = [sum(of.depth > i for of in active) for i in range(depth)]
        called = self.clock()
        drafts = self._passes.greedy(tables.step(rows, depth - 1), aux, num_active)
        if drafts is None:
            return None
        passes_s = self.clock() - called
        for of in active:
            waiting = self._waiting[of.sequence.key]
            self._entered(of.sequence, waiting, waiting.num)
        for token_ids, chances in zip(drafts.token_ids, drafts.chances, strict=True):
            for of, token_id, chance in zip(active, token_ids, chances, strict=False):
                of.draft.token_ids.append(token_id)
                of.draft.chances.append(chance)
        return [passes_s / depth] * depth, self.clock() - began - passes_s

    def _one_by_one(self, drafting: list[_Drafting], tables: DraftTables) -> list[float]:
        """Draft pass by pass. Returns the seconds of each."""
        pass_s: list[float] = []
        active, num_drafted = [*drafting], 0
        while active:
            began = self.clock()
            (self._next_pass if num_drafted else self._first_pass)(active, tables)
            pass_s.append(self.clock() - began)
            num_drafted += 1
            active = [of for of in active if of.depth > num_drafted]
        return pass_s

    def _new_entries(self, active: list[_Drafting]) -> tuple[Rows, Tensor]:
        """Entries up to the last token of each sequence, and what the target left of their tokens, [T, A]."""
        sequences = [of.sequence for of in active]
        waiting = [self._waiting[sequence.key] for sequence in sequences]
        ids = [s.token_ids[w.start + 1 : w.end + 1] for s, w in zip(sequences, waiting, strict=True)]
        aux = _joined([part for of in waiting for part in of.rows()])
        return Rows(sequences, [of.start for of in waiting], ids, [*sequences]), aux

    def _first_pass(self, active: list[_Drafting], tables: DraftTables) -> None:
        """Make entries up to the last token of each sequence, and draft a token."""
        active.sort(key=lambda of: self._waiting[of.sequence.key].num > 1)
        rows, aux = self._new_entries(active)
        self._sample(active, self._passes.first(tables.step(rows), aux), rows)
        for of in active:
            waiting = self._waiting[of.sequence.key]
            self._entered(of.sequence, waiting, waiting.num)

    def _next_pass(self, active: list[_Drafting], tables: DraftTables) -> None:
        """Make an entry of the token that each sequence drafted last, and draft the next."""
        sequences = [of.sequence for of in active]
        starts = [of.sequence.num_tokens + len(of.draft.token_ids) - 2 for of in active]
        ids = [of.draft.token_ids[-1:] for of in active]
        drafted = [DraftedRow(of.sequence, [*of.draft.token_ids]) for of in active]
        rows = Rows(sequences, starts, ids, [*drafted])
        before = [of.hidden for of in active if of.hidden is not None]
        self._sample(active, self._passes.further(tables.step(rows), torch.cat(before)), rows)

    def _sample(self, active: list[_Drafting], output: PassOutput, rows: Rows) -> None:
        """output: of each sequence's last entry. Adds a token to each draft."""
        logits, hidden = self._vocabulary.logits(output.logits), output.hidden.clone()
        sums, likeliest, best = self._sampler.logsumexp_top_k(logits, 1)
        chances = (best[:, 0] - sums).exp().tolist()
        if self._sampler.is_argmax(rows.sampled, with_masks=False):
            token_ids = likeliest[:, 0].tolist()
        else:
            token_ids = [token.token_id for token in self._sampler.sample(logits, rows.sampled)]
        for i, (of, token_id, chance) in enumerate(zip(active, token_ids, chances, strict=True)):
            of.draft.token_ids.append(token_id)
            of.draft.chances.append(chance)
            of.hidden = hidden[i : i + 1]


def _joined(parts: list[Tensor]) -> Tensor:
    """parts: [n, A] each. Returns their rows, [N, A]."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
