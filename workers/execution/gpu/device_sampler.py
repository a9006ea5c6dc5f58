"""All sampling of the GPU engine, on the device: the twin of sampler.py, in steps that a graph can hold.

    write (host)            the rows of a step, into one of two sets of buffers
    upload (device work)    what was written
    make_masks (host)       those of rows that follow a grammar: once the tokens before are known
    then one of             choose: plain rows, captured or not      ┐ device work
                            process_and_choose: any rows, not captured┘
    sampled (host)          once all that is done, with the tokens that the caller has read back

A set of buffers is written again once the step that used it last was waited for. Device work is done in the order of
the writes, one step at a time: steps share scratch and counts. Nothing here waits but `make_masks`, and nothing is read
back but the log-probabilities, in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....kernels.kv.block_copy import copy_blocks
from ....kernels.sampling.logits_processors import IN_PROMPT, LogitsProcessors, count_tokens, process_logits
from ....kernels.sampling.logsumexp import logsumexp_top_k
from ....kernels.sampling.sampling import LARGEST_VOCABULARY, SamplingScratch, sample
from ...common.errors import ConfigError
from ...common.request import MAX_LOGPROBS
from ...core.sequence import IsHere, SampledRow, SampledToken
from ...device.device import Device
from ...device.staging_buffer import StagingBuffer
from ...sampling.grammar_masks import GrammarMasks, PendingMasks
from ...sampling.sampler import changes_logits, has_logits_processors
from .draw_columns import DrawColumns, SamplingColumns, SamplingRows
from .processed_rows import Columns, Plan, ProcessedRows
from .step_buffers import NUM_HOST_BUFFERS

_TOPS = (1, 5, MAX_LOGPROBS)  # of log-probabilities: number of compiled kernels


@dataclass(slots=True, eq=False)
class _SamplerBuffers:
    draws: DrawColumns
    staging: StagingBuffer
    readback: Tensor  # [max_rows * (1 + 2 * MAX_LOGPROBS)] int32, pinned
    rows: list[SampledRow] = field(default_factory=list[SampledRow])
    plan: Plan | None = None  # None: plain rows
    pending: PendingMasks | None = None  # of rows that follow a grammar
    masks: Tensor | None = None  # [max_rows, words] int32, pinned; made with the first mask


class DeviceSampler:
    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], max_rows: int, device: Device) -> None:
        """Takes about 16 bytes of the device's memory for each of max_rows * vocab_size: before what is free is
        reserved for KV. Raises ConfigError for a vocabulary that the kernels cannot hold; torch.OutOfMemoryError."""
        if not 0 < vocab_size <= LARGEST_VOCABULARY:
            raise ConfigError(
                f"the model's vocabulary of {vocab_size} tokens exceeds the {LARGEST_VOCABULARY} that can be sampled "
                "on a GPU: serve it on cpu"
            )
        self._vocab_size, self._max_rows, self._device = vocab_size, max_rows, device
        readback = max_rows * (1 + 2 * MAX_LOGPROBS)
        self._buffers = [
            _SamplerBuffers(
                DrawColumns(max_rows, device), StagingBuffer(device), device.pinned((readback,), torch.int32)
            )
            for _ in range(NUM_HOST_BUFFERS)
        ]
        self._changed = ProcessedRows(eos_token_ids, max_rows)
        self._scratch = SamplingScratch.of(max_rows, vocab_size, device.torch_device)
        self.logits = torch.zeros(
            max_rows, vocab_size, dtype=torch.float32, device=device.torch_device
        )  # for all steps
        self._counts = torch.zeros(max_rows, vocab_size, dtype=torch.int32, device=device.torch_device)
        self._grammars = GrammarMasks(vocab_size, eos_token_ids)
        self._no_masks = torch.zeros(0, -(-vocab_size // 32), dtype=torch.int32, device=device.torch_device)
        self._sampling_rows = SamplingRows()
        self._settings = self._sampling_rows.columns([])

    def write(
        self,
        index: int,
        rows: SequenceOf[SampledRow],
        positions: SequenceOf[int],
        previous_rows: SequenceOf[int] = (),
    ) -> bool:
        """positions: of the tokens to be chosen, one a row: its num_tokens, or one more where the token before it is
        not known yet (Batch.previous_entries). previous_rows: where that one is among the tokens of the step before, or
        KNOWN; empty: all are known. All that is needed of the sequences is read now; the same sequence is in several
        rows only as its draft's, which stand after its own, in order.

        Returns whether `choose` does for them: their tokens are chosen from logits, seed and position alone."""
        here, settings = self._buffers[index], self._settings_of(rows)
        here.draws.write(settings, positions)
        here.rows, here.plan, here.pending = list(rows), None, None
        self._changed.begin_step()
        if settings.is_plain:
            return True
        counts = [position - row.num_prompt for position, row in zip(positions, rows, strict=True)]
        changed = [i for i, (row, num) in enumerate(zip(rows, counts, strict=True)) if has_logits_processors(row, num)]
        if not changed and all(row.request.sampling.logprobs is None for row in rows):
            return True
        here.plan = self._changed.plan(rows, changed, previous_rows)
        here.staging.pack(here.plan.columns)
        if not previous_rows:
            here.pending = self._grammars.begin(rows)
        return False

    def has_masks(self, index: int) -> bool:
        """Return whether a row follows a grammar: `make_masks` comes before its tokens are chosen."""
        here = self._buffers[index]
        return here.plan is not None and any(row.matcher is not None for row in here.rows)

    def make_masks(self, index: int, is_here: IsHere) -> None:
        """Make the masks, while the device computes the logits, once all tokens are known (`previous_rows`, those that
        the step before has yielded). Waits for them: they say who has a run. Raises InternalError."""
        here = self._buffers[index]
        here.pending = here.pending or self._grammars.begin(here.rows, is_here)
        if here.pending is not None:
            here.pending.masks()

    def write_drafts(self, index: int, rows: SequenceOf[SampledRow]) -> bool:
        """Write rows as `write` does, of tokens that are drafted: neither masks nor log-probabilities are made for
        them. A drafted row needs no row of its sequence before it if that was written before, with all its tokens.
        Returns whether `choose` does for them."""
        here = self._buffers[index]
        here.draws.write(self._settings_of(rows), [row.num_tokens for row in rows])
        here.rows, here.plan, here.pending = list(rows), None, None
        self._changed.begin_step()
        changed = [i for i, row in enumerate(rows) if changes_logits(row, row.num_output)]
        if changed:
            here.plan = self._changed.plan(rows, changed, is_draft=True)
            here.staging.pack(here.plan.columns)
        return not changed

    def upload(self, index: int) -> None:
        """Device work, which may be captured."""
        self._buffers[index].draws.upload()

    def choose(self, index: int, logits: Tensor, out_tokens: Tensor, num_rows: int) -> None:
        """Device work, which may be captured: the rows that were written, and idle ones up to `num_rows`, whose tokens
        are any in the vocabulary.

        logits: [num_rows, vocab] of floats, last axis contiguous; out_tokens: [num_rows] int64.
        """
        assert logits.shape == (num_rows, self._vocab_size) and num_rows <= self._max_rows
        sample(logits, self._buffers[index].draws.draws(num_rows), self._scratch, out_tokens)

    def process_and_choose(self, index: int, logits: Tensor, out_tokens: Tensor) -> None:
        """Device work, not captured, of the R rows that were written, once their masks are made.

        logits: [R or more, vocab] float32, rows contiguous, changed in place; out_tokens: [R or more] int64, which has
        the tokens of the step before, where some row follows it.
        """
        here = self._buffers[index]
        num_rows, plan = len(here.rows), here.plan
        logits, tokens = logits[:num_rows], out_tokens[:num_rows]
        if plan is None:
            self.choose(index, logits, tokens, num_rows)
            return
        columns = Columns[Tensor](*here.staging.unpack())
        raw = logits.index_select(0, columns.asking)
        if plan.has_processors:
            self._count(columns, out_tokens, has_copies=plan.has_copies)
            self._change(logits, columns, self._masks(here))
        self.choose(index, logits, tokens, num_rows)
        if plan.asking:
            packed = _packed_logprobs(raw, tokens.index_select(0, columns.asking), self._num_top(plan))
            here.readback[: packed.numel()].view(packed.shape).copy_(packed, non_blocking=True)

    def sampled(self, index: int, token_ids: SequenceOf[int]) -> list[SampledToken]:
        """token_ids: what the rows that were written yielded, read back; so is all else that the device did for them.
        Their tokens, with log-probabilities where they were asked for."""
        here = self._buffers[index]
        tokens = [SampledToken(row.sequence, token) for row, token in zip(here.rows, token_ids, strict=True)]
        if here.plan is None or not here.plan.asking:
            return tokens
        asking, num_top = here.plan.asking, self._num_top(here.plan)
        packed = here.readback[: len(asking) * (1 + 2 * num_top)].view(len(asking), -1)
        own, values = packed[:, 0].contiguous().view(torch.float32).tolist(), packed[:, 1 + num_top :].contiguous()
        top_ids, top_values = packed[:, 1 : 1 + num_top].tolist(), values.view(torch.float32).tolist()
        for i, row in enumerate(asking):
            wanted = here.rows[row].request.sampling.logprobs
            top = tuple(zip(top_ids[i][:wanted], top_values[i][:wanted], strict=True))
            tokens[row] = SampledToken(here.rows[row].sequence, token_ids[row], own[i], top)
        return tokens

    def forget(self) -> None:
        """Steps that were written may not have been computed: no history is relied on any more."""
        self._changed.forget()

    def warm_up(self) -> None:
        """Device work, not captured, before the first step: every kernel that a step may launch is compiled by it."""
        device = self._device.torch_device
        logits = torch.zeros(1, self._vocab_size, dtype=torch.float32, device=device)
        tokens = torch.zeros(1, dtype=torch.int64, device=device)
        no_rows = torch.full((16,), -1, dtype=torch.int32, device=device)
        for amount in (1, IN_PROMPT):
            count_tokens(self._counts, no_rows, torch.zeros(16, dtype=torch.int64, device=device), amount)
        one, two = torch.ones(1, dtype=torch.float32, device=device), torch.zeros(1, dtype=torch.float64, device=device)
        self._copy_counts(no_rows.long(), no_rows.long())
        starts, first = torch.tensor([0, 1], dtype=torch.int32, device=device), no_rows[:1] + 1
        process_logits(
            logits,
            LogitsProcessors(starts, first, one, no_rows[:1], self._no_masks, first, self._counts, one, two, two),
        )
        for num_top in _TOPS:
            _packed_logprobs(logits, tokens, min(num_top, self._vocab_size))
        self.choose(0, logits, tokens, 1)

    def _settings_of(self, rows: SequenceOf[SampledRow]) -> SamplingColumns:
        """Columns of these rows; mostly those of the previous batch."""
        samplings = [row.request.sampling for row in rows]
        if samplings != self._settings.samplings:
            self._settings = self._sampling_rows.columns(samplings)
        return self._settings

    def _num_top(self, plan: Plan) -> int:
        return min(next(num for num in _TOPS if num >= plan.num_top), self._vocab_size)

    def _masks(self, here: _SamplerBuffers) -> Tensor:
        """[masks, words] int32, on the device."""
        if here.pending is None:
            return self._no_masks
        if here.masks is None:
            here.masks = self._device.pinned((self._max_rows, self._no_masks.shape[1]), torch.int32)
        found = torch.from_numpy(here.pending.masks())
        host = here.masks[: len(found)]
        host.copy_(found)  # the masks of the next step are made where these were
        masks = torch.empty(host.shape, dtype=torch.int32, device=self._device.torch_device)
        return masks.copy_(host, non_blocking=True)

    def _count(self, columns: Columns[Tensor], previous_tokens: Tensor, *, has_copies: bool) -> None:
        self._counts.index_fill_(0, columns.fresh, 0)
        count_tokens(self._counts, columns.prompt_slots, columns.prompt_ids, IN_PROMPT)
        count_tokens(self._counts, columns.output_slots, columns.output_ids)
        count_tokens(self._counts, columns.fed_slots, previous_tokens.index_select(0, columns.fed_rows))
        if has_copies:
            self._copy_counts(columns.copied_from, columns.copied_to)
            count_tokens(self._counts, columns.drafted_slots, columns.drafted_ids)

    def _copy_counts(self, sources: Tensor, targets: Tensor) -> None:
        """sources, targets: [n] int64, slots; -1: nothing."""
        counts = self._counts[:, None]
        copy_blocks(counts, counts, sources, targets)

    def _change(self, logits: Tensor, columns: Columns[Tensor], masks: Tensor) -> None:
        processors = LogitsProcessors(
            columns.bias_starts,
            columns.bias_ids,
            columns.biases,
            columns.mask_rows,
            masks,
            columns.count_rows,
            self._counts,
            columns.repetition,
            columns.presence,
            columns.frequency,
        )
        process_logits(logits, processors)


def _packed_logprobs(raw: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """raw: [r, vocab] float32, before anything changed them; tokens: [r] int64, chosen.

    Returns [r, 1 + 2 * num_top] int32: the bits of the chosen token's log-probability; the likeliest tokens' ids, and
    bits.
    """
    totals, top_ids, top = logsumexp_top_k(raw, num_top)
    own = raw.gather(1, tokens[:, None]) - totals[:, None]
    return torch.cat((own.view(torch.int32), top_ids.int(), (top - totals[:, None]).view(torch.int32)), dim=1)
