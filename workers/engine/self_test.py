"""Tests whether a runner computes, after a step that failed: to tell a bad sequence from a bad worker."""

import math

from ..common.request import Request, SamplingParams
from ..core.block_manager import BlockManager
from ..core.runner import Runner
from ..core.sequence import Batch, ScheduledSequence, Sequence, SequenceStatus
from ..kv.layout import blocks_for

NUM_ROWS = 2
PROMPT = (0, 0)
MAX_TOKENS = 2


def compute_two_tokens(runner: Runner, manager: BlockManager) -> None:
    """Compute a prefill and a decode of `NUM_ROWS` test sequences, in blocks that are given back. Raises what the
    runner raises. Without free blocks nothing is computed."""
    num_blocks = blocks_for(len(PROMPT) + 1, runner.layout.block_size)
    if manager.num_free < NUM_ROWS * num_blocks or runner.info.max_context_tokens < len(PROMPT) + MAX_TOKENS:
        return
    blocks = [manager.allocate(num_blocks) for _ in range(NUM_ROWS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    request = Request("self-test", PROMPT, sampling, timeout_s=1.0)
    rows = [
        Sequence(f"self-test/{i}", request, list(PROMPT), len(PROMPT), math.inf, i, block_table=table)
        for i, table in enumerate(blocks)
    ]
    for row in rows:
        row.status = SequenceStatus.RUNNING
    try:
        prefill = Batch([ScheduledSequence(row, len(PROMPT)) for row in rows])
        for token in runner.launch(prefill).tokens():
            token.sequence.token_ids.append(token.token_id)
            token.sequence.num_computed = len(PROMPT)
        runner.launch(Batch([ScheduledSequence(row, 1) for row in rows], NUM_ROWS)).tokens()
    finally:
        for row in rows:
            row.status = SequenceStatus.FINISHED
        manager.release([block for table in blocks for block in table])
