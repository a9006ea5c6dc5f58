"""Pieces of drafts: every row attends to what it would alone."""

import random

import numpy as np
import pytest
import torch

from diptych.kernels.attention.paged_batch import PagedBatch
from diptych.workers.core.sequence import KNOWN
from diptych.workers.execution.gpu.query_pieces import has_drafts, query_pieces
from diptych.workers.execution.gpu.step_plan import Ints


def decodes_of(drafts: list[tuple[int, int]]) -> Ints:
    """drafts: of each sequence the context of its first row, and its number of rows."""
    contexts = [first + i for first, num in drafts for i in range(num)]
    tables = [10 + s for s, (_, num) in enumerate(drafts) for _ in range(num)]
    return np.array([[0] * len(contexts), [KNOWN] * len(contexts), contexts, tables], dtype=np.int32)


def test_the_example() -> None:
    decodes = decodes_of([(7, 3), (4, 1), (5, 2)])
    contexts, starts = query_pieces(decodes, 6, 2)
    assert contexts.tolist() == [8, 0, 9, 4, 6, 0]
    assert starts.tolist() == [0, 2, 2, 3, 4, 6, 6]
    assert has_drafts(decodes) and not has_drafts(decodes_of([(7, 1), (4, 1)])) and not has_drafts(decodes_of([(7, 1)]))


def test_pieces_end_where_blocks_do() -> None:
    decodes = decodes_of([(3, 6), (8, 1), (5, 4)])  # of blocks of 4: 3 4 | 5 6 7 8, 8, 5 6 7 8
    contexts, starts = query_pieces(decodes, 12, 3, 4)
    assert contexts.tolist() == [4, 0, 7, 0, 0, 8, 8, 7, 0, 0, 8, 0]
    assert starts.tolist() == [0, 2, 2, 5, 5, 5, 6, 7, 10, 10, 10, 11, 12]


@pytest.mark.parametrize("block_size", [0, 32])
@pytest.mark.parametrize("max_queries", [1, 2, 5, 16])
def test_rows_of_any_step(max_queries: int, block_size: int) -> None:
    """Read back as the twin of the kernels does; no piece is longer than it may be, or of two blocks, and idle rows
    have no context."""
    numbers = random.Random(max_queries)
    for _ in range(50):
        drafts = [(numbers.randint(1, 90), numbers.choice([1, 1, 2, 6, 17])) for _ in range(numbers.randint(1, 6))]
        decodes, num_idle = decodes_of(drafts), numbers.randint(0, 3)
        num_rows = decodes.shape[1]
        contexts, starts = query_pieces(decodes, num_rows + num_idle, max_queries, block_size)
        num_queries = np.diff(starts)
        assert starts[0] == 0 and starts[-1] == num_rows + num_idle
        assert num_queries.min() >= 0 and num_queries.max() <= max_queries
        assert ((contexts == 0) == (num_queries == 0))[:num_rows].all()
        if block_size:
            firsts, lasts = contexts - num_queries, contexts - 1
            assert (firsts // block_size == lasts // block_size)[contexts > 0].all()
        tables = torch.from_numpy(np.append(decodes[3], [0] * num_idle).astype(np.int32))[:, None]
        batch = PagedBatch(
            tables, torch.from_numpy(contexts), torch.from_numpy(starts), [], [], len(contexts), 16, max_queries
        )
        found = batch.looked_up()
        assert found.context_lens.tolist() == [*decodes[2].tolist(), *[0] * num_idle]
        assert torch.equal(found.block_tables, tables)
