"""Attention over 4-bit KV and its tail, against the same written out row by row, and in other steps."""

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.kivi_attention import kivi_attention
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from diptych.kernels.kv.kivi import GROUP, widen_blocks

from ..kivi_cases import make_kv, make_step, plain_attention, step_of

STEPS = [
    ([1], [1]),
    ([32], [1]),
    ([33, 64, 70], [1, 1, 1]),
    ([40, 5, 300], [7, 5, 1]),
    ([130, 97, 20], [100, 34, 20]),
]
SINKS = torch.linspace(-3, 3, 6)
OPTIONS = [
    NO_OPTIONS,
    AttentionOptions(scale=0.3, softcap=2.0),
    AttentionOptions(window=1),
    AttentionOptions(window=37, sinks=SINKS),
]


def queries(num: int, num_heads: int, dim: int) -> Tensor:
    return torch.randn(num, num_heads, dim, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(4, 4, 32), (6, 2, 96)])
@pytest.mark.parametrize(("lengths", "num_new"), STEPS)
def test_is_what_was_written_out(
    lengths: list[int], num_new: list[int], num_heads: int, num_kv_heads: int, dim: int
) -> None:
    for options in OPTIONS if num_heads == 6 else OPTIONS[:3]:
        step = step_of(lengths, num_new, num_kv_heads, dim, torch.float32)
        q = queries(sum(num_new), num_heads, dim)
        found = kivi_attention(q, step.pool, step.tail, step.batch, step.slots, options)
        torch.testing.assert_close(found, plain_attention(q, step, options).float(), rtol=1e-4, atol=1e-5)


def test_what_a_window_has_left_behind_is_not_read() -> None:
    options = AttentionOptions(window=40)
    step = step_of([200, 160], [1, 30], 2, 64, torch.bfloat16)
    q = queries(31, 2, 64).bfloat16()
    expected = kivi_attention(q, step.pool, step.tail, step.batch, step.slots, options)
    step.pool[step.batch.block_tables[0, :5].long()] = 0xFF
    step.pool[step.batch.block_tables[1, :2].long()] = 0xFF
    assert widen_blocks(step.pool, step.batch.block_tables[1, :2].long())[0].isnan().all()
    assert torch.equal(kivi_attention(q, step.pool, step.tail, step.batch, step.slots, options), expected)
    assert expected.dtype == torch.bfloat16 and expected.isfinite().all()


@pytest.mark.parametrize("ends", [[200], [31, 32, 33, 64, 200], [100, 199, 200], list(range(5, 201, 5))])
def test_steps_of_any_length_read_the_same(ends: list[int]) -> None:
    """Chunks of one sequence, each a step of its own, which ends in a tail of other blocks."""
    options = AttentionOptions(window=90, softcap=3.0)
    whole = step_of([200], [200], 1, 32, torch.float32)
    q = queries(200, 3, 32)
    expected = kivi_attention(q, whole.pool, whole.tail, whole.batch, whole.slots, options)
    for start, end in zip([0, *ends], ends, strict=False):
        table, lens = whole.batch.block_tables, torch.tensor([end], dtype=torch.int32)
        starts = torch.tensor([0, end - start], dtype=torch.int32)
        batch = PagedBatch(table, lens, starts, [end], [end - start], 0, GROUP)
        step = make_step(batch, [make_kv([200], 1, 32, torch.float32)[0][:end]])
        found = kivi_attention(q[start:end], step.pool, step.tail, batch, step.slots, options)
        torch.testing.assert_close(found, expected[start:end], rtol=1e-5, atol=1e-5)
