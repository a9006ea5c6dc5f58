"""All sampling of the GPU engine, on the device: the twin of sampler.py, in steps that a graph can hold.

    write (host)            the rows of a step, into one of two rooms
    upload (device work)    what was written
    then one of             choose: plain rows, captured or not      ┐ device work
                            change_and_choose: any rows, not captured┘
    sampled (host)          once all that is done, with the tokens that the caller has read back

A room is written again when the step that used it last has been waited for. Device work of all rooms is done in the
order of the writes, one at a time: it shares scratch and counts. Nothing here waits, and nothing is read back but the
log-probabilities, in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....kernels.sampling.log_totals import log_totals
from ....kernels.sampling.logit_changes import IN_PROMPT, Changes, change_logits, count_tokens
from ....kernels.sampling.sampling import LARGEST_VOCABULARY, Scratch, sample
from ...common.errors import ConfigError
from ...common.request import MAX_LOGPROBS
from ...core.sequence import SampledToken, Sequence
from ...device.device import Device
from ...sampling.sampler import is_changed
from .changed_rows import ChangedRows, Columns, Plan
from .draw_columns import DrawColumns, Settings
from .parcel import Parcel
from .step_buffers import NUM_ROOMS

_TOPS = (1, 5, MAX_LOGPROBS)  # of log-probabilities: so many kernels are compiled


@dataclass(slots=True, eq=False)
class _Room:
    draws: DrawColumns
    parcel: Parcel
    readback: Tensor  # [max_rows * (1 + 2 * MAX_LOGPROBS)] int32, pinned
    sequences: list[Sequence] = field(default_factory=list[Sequence])
    plan: Plan | None = None  # None: plain rows


class DeviceSampler:
    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], max_rows: int, device: Device) -> None:
        """Takes about 12 bytes of the device's memory for each of max_rows * vocab_size: before what is free is
        reserved for KV. Raises ConfigError for a vocabulary that the kernels cannot hold; torch.OutOfMemoryError."""
        if not 0 < vocab_size <= LARGEST_VOCABULARY:
            raise ConfigError(
                f"the model's vocabulary of {vocab_size} tokens is more than the {LARGEST_VOCABULARY} that are sampled "
                "on a GPU: serve it on cpu"
            )
        self._vocab_size, self._max_rows, self._device = vocab_size, max_rows, device
        readback = max_rows * (1 + 2 * MAX_LOGPROBS)
        self._rooms = [
            _Room(DrawColumns(max_rows, device), Parcel(device), device.pinned((readback,), torch.int32))
            for _ in range(NUM_ROOMS)
        ]
        self._changed = ChangedRows(eos_token_ids, max_rows)
        self._scratch = Scratch.of(max_rows, vocab_size, device.torch_device)
        self._counts = torch.zeros(max_rows, vocab_size, dtype=torch.int32, device=device.torch_device)
        self._masks = torch.zeros(0, -(-vocab_size // 32), dtype=torch.int32, device=device.torch_device)
        self._settings = Settings.of([])

    def is_capturable(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether `choose` does for them: their next tokens are chosen from logits, seed and position alone."""
        if self._settings_of(sequences).is_plain:
            return True
        return all(s.request.sampling.logprobs is None and not is_changed(s) for s in sequences)

    def write(self, room: int, sequences: SequenceOf[Sequence], positions: SequenceOf[int]) -> None:
        """positions: of the tokens to be chosen, one a sequence: its num_tokens, or one more where the token before it
        is not known yet (Batch.previous_entries), which plain rows alone can have. All that is needed of the sequences
        is read now; the same sequence is not in two rows."""
        here, settings = self._rooms[room], self._settings_of(sequences)
        here.draws.write(settings, positions)
        here.sequences, here.plan = list(sequences), None
        self._changed.begin_step()
        if self.is_capturable(sequences):
            return
        assert all(position == s.num_tokens for position, s in zip(positions, sequences, strict=True))
        here.plan = self._changed.plan(sequences, [i for i, s in enumerate(sequences) if is_changed(s)])
        here.parcel.pack(here.plan.columns)

    def upload(self, room: int) -> None:
        """Device work, which may be captured."""
        self._rooms[room].draws.upload()

    def choose(self, room: int, logits: Tensor, out_tokens: Tensor, num_rows: int) -> None:
        """Device work, which may be captured: the rows that were written, and idle ones up to `num_rows`, whose tokens
        are any in the vocabulary.

        logits: [num_rows, vocab] of floats, last axis contiguous; out_tokens: [num_rows] int64.
        """
        assert logits.shape == (num_rows, self._vocab_size) and num_rows <= self._max_rows
        sample(logits, self._rooms[room].draws.draws(num_rows), self._scratch, out_tokens)

    def change_and_choose(self, room: int, logits: Tensor, out_tokens: Tensor) -> None:
        """Device work, not captured, of the R rows that were written.

        logits: [R or more, vocab] float32, rows contiguous, changed in place; out_tokens: [R or more] int64.
        """
        here = self._rooms[room]
        num_rows, plan = len(here.sequences), here.plan
        logits, tokens = logits[:num_rows], out_tokens[:num_rows]
        if plan is None:
            self.choose(room, logits, tokens, num_rows)
            return
        columns = Columns[Tensor](*here.parcel.unpack())
        raw = logits.index_select(0, columns.asking)
        if plan.is_changing:
            self._change(logits, columns)
        self.choose(room, logits, tokens, num_rows)
        if plan.asking:
            packed = _packed_logprobs(raw, tokens.index_select(0, columns.asking), self._num_top(plan))
            here.readback[: packed.numel()].view(packed.shape).copy_(packed, non_blocking=True)

    def sampled(self, room: int, token_ids: SequenceOf[int]) -> list[SampledToken]:
        """token_ids: what the rows that were written yielded, read back; so is all else that the device did for them.
        Their tokens, with log-probabilities where they were asked for."""
        here = self._rooms[room]
        tokens = [SampledToken(*of) for of in zip(here.sequences, token_ids, strict=True)]
        if here.plan is None or not here.plan.asking:
            return tokens
        asking, num_top = here.plan.asking, self._num_top(here.plan)
        packed = here.readback[: len(asking) * (1 + 2 * num_top)].view(len(asking), -1)
        own, values = packed[:, 0].contiguous().view(torch.float32).tolist(), packed[:, 1 + num_top :].contiguous()
        top_ids, top_values = packed[:, 1 : 1 + num_top].tolist(), values.view(torch.float32).tolist()
        for i, row in enumerate(asking):
            wanted = here.sequences[row].request.sampling.logprobs
            top = tuple(zip(top_ids[i][:wanted], top_values[i][:wanted], strict=True))
            tokens[row] = SampledToken(here.sequences[row], token_ids[row], own[i], top)
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
        starts, first = torch.tensor([0, 1], dtype=torch.int32, device=device), no_rows[:1] + 1
        change_logits(logits, Changes(starts, first, one, no_rows[:1], self._masks, first, self._counts, one, two, two))
        for num_top in _TOPS:
            _packed_logprobs(logits, tokens, min(num_top, self._vocab_size))
        self.choose(0, logits, tokens, 1)

    def _settings_of(self, sequences: SequenceOf[Sequence]) -> Settings:
        """Of the batch before, most times."""
        samplings = [s.request.sampling for s in sequences]
        if samplings != self._settings.samplings:
            self._settings = Settings.of(samplings)
        return self._settings

    def _num_top(self, plan: Plan) -> int:
        return min(next(num for num in _TOPS if num >= plan.num_top), self._vocab_size)

    def _change(self, logits: Tensor, columns: Columns[Tensor]) -> None:
        self._counts.index_fill_(0, columns.fresh, 0)
        count_tokens(self._counts, columns.prompt_slots, columns.prompt_ids, IN_PROMPT)
        count_tokens(self._counts, columns.output_slots, columns.output_ids)
        no_masks = torch.full_like(columns.count_rows, -1)
        changes = Changes(
            columns.bias_starts,
            columns.bias_ids,
            columns.biases,
            no_masks,
            self._masks,
            columns.count_rows,
            self._counts,
            columns.repetition,
            columns.presence,
            columns.frequency,
        )
        change_logits(logits, changes)


def _packed_logprobs(raw: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """raw: [r, vocab] float32, before anything changed them; tokens: [r] int64, chosen.

    Returns [r, 1 + 2 * num_top] int32: the bits of the chosen token's log-probability; the likeliest tokens' ids, and
    bits.
    """
    totals, top_ids, top = log_totals(raw, num_top)
    own = raw.gather(1, tokens[:, None]) - totals[:, None]
    return torch.cat((own.view(torch.int32), top_ids.int(), (top - totals[:, None]).view(torch.int32)), dim=1)
