"""Buffers that steps share: two sets on the host, written by turns; one set on the device, at fixed addresses.

    host 0, host 1 (pinned)  ──one copy──>  columns ──> ... ──> logits ──> tokens  ──one copy──>  host 0, host 1

A step's host buffers are written while the previous step is computed; they are reused once that step was waited for.
The device has one set: on the main lane, steps are in order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....kernels.attention.paged_batch import LatentLibrary, PagedBatch
from ....kernels.elementwise.step_inputs import DecodeRows, step_inputs
from ...core.sequence import KNOWN
from ...device.device import Device, Event
from .buckets import StepSizes
from .query_pieces import query_pieces
from .step_plan import CONTEXT, FEED, NO_ROWS, SPARSE, TABLE, TOKEN, Ints

NUM_HOST_BUFFERS = 2
SEEN, START, TAIL = range(5, 8)  # columns after those of StepPlan.decodes: see query_pieces, StepPlan.tails
NUM_COLUMNS = 8
_IDLE = {TOKEN: 0, FEED: KNOWN, CONTEXT: 0, TABLE: 0, SPARSE: 0}  # a row that decodes nothing


@dataclass(slots=True, eq=False)
class HostBuffers:
    columns: Tensor  # [NUM_COLUMNS, max_rows + 1 or more] int32, pinned
    tokens: Tensor  # [max_rows] int64, pinned: the tokens of the step
    used: Event | None = None  # until then

    def wait(self) -> None:
        if self.used is not None:
            self.used.wait()
            self.used = None

    def write(self, decodes: Ints, bucket: int, max_queries: int, tails: Ints = NO_ROWS, block_size: int = 0) -> None:
        """decodes, tails: see StepPlan; and idle rows up to `bucket`. max_queries: rows that attend together at most;
        with tails, they are of one block of `block_size` tokens."""
        columns, num_rows = self.columns.numpy(), decodes.shape[1]
        columns[:SEEN, :num_rows] = decodes
        columns[:SEEN, num_rows:bucket] = np.array(list(_IDLE.values()), dtype=np.int32)[:, None]
        if max_queries > 1:
            cut_at = block_size if len(tails) else 0
            columns[SEEN, :bucket], columns[START, : bucket + 1] = query_pieces(decodes, bucket, max_queries, cut_at)
        if len(tails):
            columns[TAIL, :num_rows] = tails


@dataclass(frozen=True, slots=True, eq=False)
class RowInputs:
    """Inputs of R rows, of which each has one token."""

    tokens: Tensor  # [R] int64
    cos_sin: Tensor  # [R, A] float32
    slots: Tensor  # [R] int64; -1: idle
    filled: Tensor | None  # [R, 2] int64, see TailStep; None: there is no KV tail
    paged: PagedBatch


class StepBuffers:
    def __init__(self, device: Device, sizes: StepSizes, max_blocks: int, logits: Tensor | None) -> None:
        """max_blocks: of a sequence. logits: [max_rows, vocab] float32, of all steps; None on a rank that does not
        sample. Raises torch.OutOfMemoryError."""
        self.sizes, max_rows = sizes, sizes.max_rows
        on, padded = device.torch_device, -(-(max_rows + 1) // 4) * 4  # kernels like addresses that are multiples of 16
        self.host = [
            HostBuffers(device.pinned((NUM_COLUMNS, padded), torch.int32), device.pinned((max_rows,), torch.int64))
            for _ in range(NUM_HOST_BUFFERS)
        ]
        self._columns = torch.zeros(NUM_COLUMNS, padded, dtype=torch.int32, device=on)
        self._columns[FEED], self._columns[START] = KNOWN, torch.arange(padded, device=on)
        self.block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=on)
        self._each_alone = torch.arange(max_rows + 1, dtype=torch.int32, device=on)  # query_starts of rows
        self.logits = torch.zeros(max_rows, 0, device=on) if logits is None else logits
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=on)
        self.latents: LatentLibrary | None = None  # that graphs capture

    def upload(self, host: HostBuffers) -> None:
        """Device work."""
        self._columns.copy_(host.columns, non_blocking=True)

    def gather_tables(self, tables: Tensor, bucket: int) -> None:
        """Device work. tables: [rows, max_blocks] int32, of which the host buffers name some."""
        torch.index_select(tables, 0, self._columns[TABLE, :bucket], out=self.block_tables[:bucket])

    def read_back(self, host: HostBuffers) -> None:
        """Device work."""
        host.tokens.copy_(self.tokens, non_blocking=True)

    def rows(self, bucket: int, *, has_tail: bool) -> DecodeRows:
        columns, tables = self._columns[:, :bucket], self.block_tables[:bucket]
        tails = columns[TAIL] if has_tail else None
        return DecodeRows(columns[TOKEN], columns[FEED], columns[CONTEXT], tables, self.tokens, tails)

    def inputs(
        self, bucket: int, max_queries: int, cos_sin: Tensor, block_size: int, *, has_tail: bool = False
    ) -> "RowInputs":
        """Device work, which may be captured: what a decoder needs of the rows up to `bucket`. cos_sin: [positions, A]
        float32."""
        rows = self.rows(bucket, has_tail=has_tail)
        paged = PagedBatch(
            rows.block_tables,
            *self.queries(bucket, max_queries),
            host_context_lens=[],
            host_num_new=[1] * bucket,
            num_decodes=bucket,
            block_size=block_size,
            max_queries=max_queries,
            latents=self.latents,
        )
        return RowInputs(*step_inputs(rows, cos_sin, block_size), paged)

    def sparse(self, bucket: int) -> tuple[Tensor, Tensor]:
        """Rows that are sparse [bucket] bool, and contexts [bucket] int32, 0 of other rows."""
        is_sparse = self._columns[SPARSE, :bucket] > 0
        return is_sparse, self._columns[CONTEXT, :bucket].masked_fill(~is_sparse, 0)

    def queries(self, bucket: int, max_queries: int) -> tuple[Tensor, Tensor]:
        """Contexts [bucket] and query_starts [bucket + 1] of rows of which at most so many attend together."""
        if max_queries == 1:
            return self._columns[CONTEXT, :bucket], self._each_alone[: bucket + 1]
        return self._columns[SEEN, :bucket], self._columns[START, : bucket + 1]
