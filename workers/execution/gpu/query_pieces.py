"""Rows of a decode graph that attend together: those of a draft, in pieces of at most `max_queries` rows. No torch.

    rows            a  a  a  b  c  c      the last token of each sequence and its draft, side by side and in order
    contexts        7  8  9  4  5  6      of each row, with itself
    pieces of two   8  .  9  4  6  .      ends of pieces: to the kernels a piece is a sequence that ends with it
    query_starts    0  2  2  3  4  6  6   a row that is not the first of its piece is a sequence of no tokens

A row's KV is stored before any row attends. So pieces of one row would give the same result: those of several read the
context that they share once. Where KV has a tail, a piece ends where a block does: its rows have one own block.
"""

import numpy as np

from .step_plan import CONTEXT, TABLE, Ints


def has_drafts(decodes: Ints) -> bool:
    """Return whether a sequence has several rows. decodes: see StepPlan."""
    tables = decodes[TABLE]
    return bool((tables[1:] == tables[:-1]).any())


def query_pieces(decodes: Ints, bucket: int, max_queries: int, block_size: int = 0) -> tuple[Ints, Ints]:
    """Return contexts [bucket] and query_starts [bucket + 1] of the pieces, int32. decodes: see StepPlan; rows after
    these, up to `bucket`, are idle. block_size: of the blocks at whose ends pieces end, too; 0: they do not."""
    tables, num_rows = decodes[TABLE], decodes.shape[1]
    row = np.arange(bucket + 1, dtype=np.int32)
    own = row[:num_rows]
    begins = np.concatenate(([True], tables[1:] != tables[:-1]))  # a draft, or a block within
    if block_size:
        begins |= decodes[CONTEXT] % block_size == 1
    first = np.maximum.accumulate(np.where(begins, own, 0))
    starts_piece = (own - first) % max_queries == 0
    ends = np.append(np.flatnonzero(starts_piece)[1:], num_rows)
    end = ends[np.cumsum(starts_piece) - 1].astype(np.int32)
    contexts = np.zeros(bucket, dtype=np.int32)
    contexts[:num_rows] = np.where(starts_piece, decodes[CONTEXT][end - 1], 0)
    query_starts = row.copy()
    query_starts[:num_rows] = np.where(starts_piece, own, end)
    return contexts, query_starts
