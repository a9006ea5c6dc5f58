"""Logits processors: biases and bans, a mask of allowed tokens, and penalties, applied before a token is chosen.

The order is vLLM's: bias; then the repetition penalty over prompt and output (CTRL, Keskar et al. 2019, section 4.1);
then presence and frequency penalties over output. A banned or masked token is -inf throughout.

Which tokens a request has seen is kept on the device, a row of counts for each request that has penalties, so that a
token goes from one step into the next without the host: count_tokens adds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, tl
from ..common.tuning import chip_of

IN_PROMPT = 1 << 30  # in a count: the prompt has the token; below it: how often the output has
_BIASES = 128  # added at a time
_TILE = 2048
_NUM_WARPS = 4


@dataclass(frozen=True)
class LogitsProcessors:
    """Logits processors of each row, on the device. Rows share masks and counts by number; -1: none, and the row's
    tensors are not read."""

    bias_starts: Tensor  # [R + 1] int32: the biases of row i are those from bias_starts[i] to bias_starts[i + 1]
    bias_ids: Tensor  # [B] int32, none twice in a row; B is bias_starts[R]
    biases: Tensor  # [B] float32; -inf: banned
    mask_rows: Tensor  # [R] int32
    masks: Tensor  # [masks, ceil(vocab / 32)] int32: bit i % 32 of word i // 32 is set where token i is allowed
    count_rows: Tensor  # [R] int32
    counts: Tensor  # [rows, vocab] int32: see IN_PROMPT
    repetition: Tensor  # [R] float32; 1: off
    presence: Tensor  # [R] float64; 0: off
    frequency: Tensor  # [R] float64; 0: off

    def check(self, logits: Tensor) -> None:
        num_rows, vocab_size = logits.shape
        assert logits.dtype == torch.float32 and logits.stride(1) == 1
        assert self.bias_starts.shape == (num_rows + 1,) and self.bias_ids.shape == self.biases.shape
        assert self.bias_ids.dim() == 1
        assert self.masks.shape[1] == -(-vocab_size // 32) and self.counts.shape[1] == vocab_size
        per_row = (self.mask_rows, self.count_rows, self.repetition, self.presence, self.frequency)
        assert all(t.shape == (num_rows,) for t in per_row)
        whole = (self.bias_starts, self.bias_ids, self.mask_rows, self.masks, self.count_rows, self.counts)
        assert all(t.dtype == torch.int32 for t in whole)
        assert self.biases.dtype == self.repetition.dtype == torch.float32
        assert self.presence.dtype == self.frequency.dtype == torch.float64
        assert all(t.is_contiguous() for t in (*per_row, *whole, self.biases))


def process_logits(logits: Tensor, processors: LogitsProcessors) -> None:
    """logits: [R, vocab] float32, last axis contiguous, changed in place, as workers/sampling/sampler.py does."""
    kernel_for(logits, process_logits_triton, process_logits_twin)(logits, processors)


def count_tokens(counts: Tensor, rows: Tensor, ids: Tensor, amount: int = 1) -> None:
    """counts[rows[i], ids[i]]: its output count grows by one; or, where `amount` is IN_PROMPT, the prompt has it.

    counts: [rows, vocab] int32 contiguous; rows: [n] int32, -1: nothing is counted; ids: [n] int64.
    """
    kernel_for(counts, count_tokens_triton, count_tokens_twin)(counts, rows, ids, amount)


def process_logits_twin(logits: Tensor, processors: LogitsProcessors) -> None:
    processors.check(logits)
    if len(processors.bias_ids):
        numbers = torch.arange(len(processors.bias_ids), dtype=torch.int32, device=logits.device)
        rows = torch.searchsorted(processors.bias_starts[1:], numbers, right=True)
        logits.index_put_((rows, processors.bias_ids.long()), processors.biases, accumulate=True)
    if len(processors.masks):
        token = torch.arange(logits.shape[1], device=logits.device)
        words = processors.masks[processors.mask_rows.clamp_min(0).long()][:, token // 32]
        is_masked = ((words >> (token % 32)) & 1 == 0) & (processors.mask_rows >= 0)[:, None]
        logits.masked_fill_(is_masked, -torch.inf)
    if len(processors.counts):
        counts = processors.counts[processors.count_rows.clamp_min(0).long()]
        counts = torch.where(processors.count_rows[:, None] >= 0, counts, 0)
        penalty = processors.repetition[:, None]
        logits.copy_(torch.where(counts == 0, logits, torch.where(logits > 0, logits / penalty, logits * penalty)))
        num_output = counts & (IN_PROMPT - 1)
        amounts = processors.presence[:, None] + processors.frequency[:, None] * num_output.double()
        logits.sub_(torch.where(num_output > 0, amounts, 0.0).float())


def process_logits_triton(logits: Tensor, processors: LogitsProcessors) -> None:
    processors.check(logits)
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    if len(processors.bias_ids):
        _add_biases[(num_rows,)](
            logits,
            processors.bias_starts,
            processors.bias_ids,
            processors.biases,
            logits.stride(0),
            BLOCK=_BIASES,
            num_warps=_NUM_WARPS,
        )
    num_tiles = -(-vocab_size // _TILE)
    programs = -(-chip_of(logits.device).resident_programs(_NUM_WARPS) // num_rows)
    _mask_and_penalise[(num_rows, min(num_tiles, programs))](
        logits,
        processors.mask_rows,
        processors.masks,
        processors.count_rows,
        processors.counts,
        processors.repetition,
        processors.presence,
        processors.frequency,
        logits.stride(0),
        processors.masks.shape[1],
        vocab_size,
        TILE=_TILE,
        num_warps=_NUM_WARPS,
    )


def count_tokens_twin(counts: Tensor, rows: Tensor, ids: Tensor, amount: int = 1) -> None:
    _check_counted(counts, rows, ids, amount)
    if not len(rows):
        return
    is_counted, at = rows >= 0, rows.clamp_min(0).long() * counts.shape[1] + ids
    flat = counts.view(-1)
    if amount == IN_PROMPT:
        flat.scatter_reduce_(0, at, torch.where(is_counted, flat[at] | IN_PROMPT, 0), "amax")
    else:
        flat.index_add_(0, at, is_counted.int())


def count_tokens_triton(counts: Tensor, rows: Tensor, ids: Tensor, amount: int = 1) -> None:
    _check_counted(counts, rows, ids, amount)
    if len(rows):
        _count_tokens[(-(-len(rows) // _TILE),)](
            counts,
            rows,
            ids,
            counts.shape[1],
            len(rows),
            AMOUNT=amount,
            TILE=_TILE,
            num_warps=_NUM_WARPS,
        )


def _check_counted(counts: Tensor, rows: Tensor, ids: Tensor, amount: int) -> None:
    assert counts.dim() == 2 and counts.dtype == torch.int32 and counts.is_contiguous()
    assert rows.dim() == 1 and rows.dtype == torch.int32 and rows.is_contiguous()
    assert ids.shape == rows.shape and ids.dtype == torch.int64 and ids.is_contiguous()
    assert amount in (1, IN_PROMPT)


@jit
def _add_biases(
    logits: tl.tensor,  # [R, vocab] float32
    bias_starts: tl.tensor,  # [R + 1] int32
    bias_ids: tl.tensor,  # [B] int32
    biases: tl.tensor,  # [B] float32
    row_stride: int,
    BLOCK: tl.constexpr,
):
    """Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(bias_starts + row + 1)
    for start in range(tl.load(bias_starts + row), end, BLOCK):  # pyright: ignore[reportArgumentType]
        i = start + tl.arange(0, BLOCK)
        given = i < end
        at = logits + row * row_stride + tl.load(bias_ids + i, mask=given, other=0)
        bias = tl.load(biases + i, mask=given, other=0.0)
        tl.store(at, tl.load(at, mask=given, other=0.0) + bias, mask=given)


@jit
def _mask_and_penalise(
    logits: tl.tensor,  # [R, vocab] float32
    mask_rows: tl.tensor,  # [R] int32
    masks: tl.tensor,  # [masks, num_words] int32
    count_rows: tl.tensor,  # [R] int32
    counts: tl.tensor,  # [rows, vocab] int32
    repetitions: tl.tensor,  # [R] float32
    presences: tl.tensor,  # [R] float64
    frequencies: tl.tensor,  # [R] float64
    row_stride: int,
    num_words: int,
    vocab_size: int,
    TILE: tl.constexpr,
):
    """Grid: (R, programs of a row)."""
    row = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(mask_rows + row).to(tl.int64)
    count_row = tl.load(count_rows + row).to(tl.int64)
    if (mask_row >= 0) | (count_row >= 0):
        penalty = tl.load(repetitions + row)
        presence, frequency = tl.load(presences + row), tl.load(frequencies + row)
        for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
            i = tile * TILE + tl.arange(0, TILE)
            inside = i < vocab_size
            values = tl.load(logits + row * row_stride + i, mask=inside, other=0.0)
            if mask_row >= 0:
                words = tl.load(masks + mask_row * num_words + i // 32, mask=inside, other=0)
                values = tl.where((words >> (i % 32)) & 1 != 0, values, float("-inf"))
            if count_row >= 0:
                count = tl.load(counts + count_row * vocab_size + i, mask=inside, other=0)
                repeated = tl.where(values > 0.0, tl.div_rn(values, penalty), values * penalty)
                values = tl.where(count == 0, values, repeated)
                num_output = count & 0x3FFFFFFF
                amounts = presence + frequency * num_output.to(tl.float64)
                values -= tl.where(num_output > 0, amounts, 0.0).to(tl.float32)
            tl.store(logits + row * row_stride + i, values, mask=inside)


@jit
def _count_tokens(
    counts: tl.tensor,  # [rows, vocab] int32
    rows: tl.tensor,  # [n] int32
    ids: tl.tensor,  # [n] int64
    vocab_size: int,
    num: int,
    AMOUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (ceil(n / TILE),)."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(rows + i, mask=i < num, other=-1).to(tl.int64)
    at = counts + row * vocab_size + tl.load(ids + i, mask=i < num, other=0)
    if AMOUNT == 1:
        tl.atomic_add(at, 1, mask=row >= 0)
    else:
        tl.atomic_or(at, AMOUNT, mask=row >= 0)
