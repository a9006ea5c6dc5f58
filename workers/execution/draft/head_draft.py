"""HeadDraft: drafts with a head that reads the target's hidden states (EAGLE-3, Li et al. 2025, arXiv 2503.01840; MTP,
DeepSeek-V3, arXiv 2412.19437, section 2.2; methods `eagle3` and `mtp`).

The head's entry at position i has the embedding of token i + 1 and the hidden state of token i (head_spec.py). So:

    a step of the target   leaves hidden states of what it computed; those whose next token is known become entries at
                           once where a prompt is computed, and else at the next draft
    propose                pass 1: the entries up to the last token, from the target's hidden states; drafts one token
                           pass 2 ..: an entry of the token just drafted and of the head's own output; drafts the next
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
from functools import partial

import torch
from torch import Tensor

from ...core.draft import NO_DRAFT, Draft, ModelDrafts
from ...core.draft_kv import DraftKV
from ...core.sequence import Batch, DraftedRow, DraftEntry, Sequence
from ...device.kv_cache import KVCache
from ...models.heads.draft_head import DraftHead
from ...models.layers.hidden_states import HiddenStates
from ...models.layers.rope import Ropes
from ...sampling.sampler import Sampler
from ..common.draft_rows import DraftRows, HeadPasses
from .draft_steps import DraftTables, Rows

FEW = 2  # new entries of a sequence in a pass whose time is usual
MOST_WAITING = 64  # hidden states of a sequence that is not drafted for; more become entries


@dataclass(slots=True)
class _Waiting:
    """Hidden states of a sequence's tokens from position `start` on, which are no entries yet."""

    start: int
    rows: Tensor  # [n, A]

    @property
    def end(self) -> int:
        return self.start + len(self.rows)


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
        head: DraftHead,
        taken: HiddenStates,
        cache: KVCache,
        cos_sin: Ropes,
        sampler: Sampler,
        passes: HeadPasses | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """taken: what the target's steps leave. cos_sin: of the head's ropes. sampler: knows no grammars. passes: of
        the device that computes; None: the host computes. clock: gives seconds."""
        self._passes = passes
        self._head, self._taken, self._cache, self._cos_sin = head, taken, cache, cos_sin
        self._sampler, self._clock, self._block_size = sampler, clock, cache.layout.block_size
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
        return waiting.end == sequence.num_computed

    def computed(self, batch: Batch) -> None:
        """Take the hidden states of a step's tokens; before they are counted."""
        self._do(partial(self._computed, batch))

    def _do(self, work: Callable[[], object]) -> None:
        """Do work, on the device where one computes."""
        if self._passes is None:
            with torch.inference_mode():
                work()
        else:
            self._passes.run(work)

    def _computed(self, batch: Batch) -> None:
        rows, first = self._taken.rows, 0
        prompts = {entry.sequence for entry in batch.entries[batch.num_decodes + batch.num_runs :]}
        for entry in self._taken.entries:
            of = rows[first : first + entry.num_new]
            first += entry.num_new
            if isinstance(entry, DraftEntry):
                of = of[: len(entry.yielded)]  # those after tokens that were not accepted are of other texts
            sequence = entry.sequence
            if not sequence.request.speculates or sequence.pooling is not None:
                continue
            self._wait(sequence, sequence.num_computed, of)
            waiting = self._waiting.get(sequence.key)
            if waiting is not None and (sequence in prompts or len(waiting.rows) > MOST_WAITING):
                self._enter(sequence, waiting)

    def seal(self, sequence: Sequence) -> None:
        """Compute the entries of all tokens that are computed: their sequence is about to be handed off."""
        if self.may_draft(sequence):
            self._do(partial(self._enter, sequence, self._waiting[sequence.key]))

    @torch.inference_mode()
    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        if self._passes is not None:
            return self._chained(self._passes, wanted)
        drafting = [_Drafting(sequence, depth, Draft([], [])) for sequence, depth in wanted]
        pass_s: list[float] = []
        tables = DraftTables([of.sequence for of in drafting], self._block_size)
        active, num_drafted = [*drafting], 0  # which is sorted; what is returned is in the order of `wanted`
        while active:
            began = self._clock()
            num_new = self._first_pass(active, tables) if num_drafted == 0 else self._next_pass(active, tables)
            if num_new <= FEW:
                pass_s.append(self._clock() - began)
            num_drafted += 1
            active = [of for of in active if of.depth > num_drafted]
        return ModelDrafts([of.draft or NO_DRAFT for of in drafting], pass_s)

    def _chained(self, passes: HeadPasses, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        """Have all passes computed one after the other."""
        longest_first = sorted(wanted, key=lambda each: -each[1])
        sequences, depths = [of for of, _ in longest_first], [depth for _, depth in longest_first]
        waiting, room = [self._waiting[of.key] for of in sequences], passes.max_rows - len(sequences)
        for sequence, of in zip(sequences, waiting, strict=True):
            if len(of.rows) - 1 > room:
                passes.run(partial(self._enter, sequence, of, num_kept=1))
            room -= len(of.rows) - 1
        began = self._clock()
        ids = [s.token_ids[w.start + 1 : w.end + 1] for s, w in zip(sequences, waiting, strict=True)]
        rows = DraftRows(sequences, [of.start for of in waiting], ids, depths)
        made = passes.draft(rows, [of.rows for of in waiting])
        for sequence, of in zip(sequences, waiting, strict=True):
            self._entered(sequence, of, len(of.rows))
        drafts = {sequence.key: draft for sequence, draft in zip(sequences, made, strict=True)}
        pass_s = [(self._clock() - began) / depths[0]] * depths[0]
        return ModelDrafts([drafts[sequence.key] for sequence, _ in wanted], pass_s)

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        """Do nothing: entries of drafted tokens do not count."""

    def ended(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence.key, None)

    def _wait(self, sequence: Sequence, start: int, rows: Tensor) -> None:
        """Keep hidden states of the tokens from position `start` on, if no token before them lacks its own."""
        waiting = self._waiting.get(sequence.key)
        is_next = waiting is not None and waiting.start == sequence.num_draft_computed and waiting.end == start
        if waiting is not None and is_next:
            waiting.rows = torch.cat((waiting.rows, rows))
        elif start == sequence.num_draft_computed:
            self._waiting[sequence.key] = _Waiting(start, rows)
        else:
            self._waiting.pop(sequence.key, None)

    def _enter(self, sequence: Sequence, waiting: _Waiting, num_kept: int = 0) -> None:
        """Make entries of the waiting hidden states whose next token is known, but for the last `num_kept`."""
        end = min(waiting.end - num_kept, sequence.num_tokens - 1)
        num = end - waiting.start
        if num <= 0:
            return
        ids = sequence.token_ids[waiting.start + 1 : end + 1]
        rows = Rows([sequence], [waiting.start], [ids], [])
        self._forward(rows, DraftTables([sequence], self._block_size), self._head.enter(waiting.rows[:num]))
        self._entered(sequence, waiting, num)

    def _entered(self, sequence: Sequence, waiting: _Waiting, num: int) -> None:
        assert self._kv is not None
        waiting.start, waiting.rows = waiting.start + num, waiting.rows[num:].clone()  # without those of all the step
        self._kv.advance(sequence, waiting.start)

    def _first_pass(self, active: list[_Drafting], tables: DraftTables) -> int:
        """Make entries up to the last token of each sequence, and draft a token. Returns the most entries of one."""
        active.sort(key=lambda of: len(self._waiting[of.sequence.key].rows) > 1)
        sequences = [of.sequence for of in active]
        waiting = [self._waiting[sequence.key] for sequence in sequences]
        ids = [s.token_ids[w.start + 1 : w.end + 1] for s, w in zip(sequences, waiting, strict=True)]
        rows = Rows(sequences, [w.start for w in waiting], ids, [*sequences])
        aux = torch.cat([w.rows for w in waiting])
        hidden = self._forward(rows, tables, self._head.enter(aux))
        lengths = torch.tensor(rows.num_new)
        self._sample(active, hidden[(lengths.cumsum(0) - 1).to(hidden.device)], rows)
        for sequence, of in zip(sequences, waiting, strict=True):
            self._entered(sequence, of, len(of.rows))
        return max(rows.num_new)

    def _next_pass(self, active: list[_Drafting], tables: DraftTables) -> int:
        """Make an entry of the token that each sequence drafted last, and draft the next."""
        sequences = [of.sequence for of in active]
        starts = [of.sequence.num_tokens + len(of.draft.token_ids) - 2 for of in active]
        ids = [of.draft.token_ids[-1:] for of in active]
        drafted = [DraftedRow(of.sequence, [*of.draft.token_ids]) for of in active]
        rows = Rows(sequences, starts, ids, [*drafted])
        before = [of.hidden for of in active if of.hidden is not None]
        self._sample(active, self._forward(rows, tables, torch.cat(before)), rows)
        return 1

    def _forward(self, rows: Rows, tables: DraftTables, hidden: Tensor) -> Tensor:
        """hidden: [T, H], the head's input. Returns its output, [T, H]."""
        step = tables.step(rows)
        token_ids = torch.from_numpy(step.token_ids).to(hidden.device).long()
        return self._head.forward(token_ids, hidden, self._cache, step.meta(self._cos_sin, self._block_size))

    def _sample(self, active: list[_Drafting], hidden: Tensor, rows: Rows) -> None:
        """hidden: [R, H], the head's output of each sequence's last entry. Adds a token to each draft."""
        own = self._head.logits(hidden)
        size = self._head.spec.decoder.vocab_size
        if own.shape[1] == size:
            logits = own
        else:
            logits = own.new_full((len(own), size), -torch.inf)
            logits[:, self._head.to_target(torch.arange(own.shape[1], device=own.device))] = own
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
