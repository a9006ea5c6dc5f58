"""The twin that cuts contexts and merges, against the one that attends to them whole. (Triton: triton_cases/.)"""

import pytest
import torch

from diptych.kernels.attention.decode_attention import decode_attention_twin
from diptych.kernels.attention.decode_plan import Decodes, plan_decode_twin
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions
from diptych.kernels.attention.prefill_attention import list_tiles, prefill_attention_twin
from diptych.kernels.kv.kv_scales import quantise

from ...support.paged import make_batch, make_cache

OPTIONS = [
    NO_OPTIONS,
    AttentionOptions(window=7),
    AttentionOptions(scale=0.3, softcap=5.0, window=40, sinks=torch.linspace(-1, 1, 6)),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("context_lens", "num_new"), [([1], [1]), ([130, 3, 65, 16], [4, 3, 1, 16])])
@pytest.mark.parametrize(("programs", "stored"), [(1, torch.int8), (7, torch.int8), (7, torch.uint8)])
def test_cut_contexts_merge_to_whole_ones(
    context_lens: list[int], num_new: list[int], programs: int, stored: torch.dtype, options: AttentionOptions
) -> None:
    batch = make_batch(context_lens, num_new, 5, 100)
    cache, scales = quantise(make_cache(batch, 100, 2, 20, torch.float32).nan_to_num(), stored)
    q = torch.randn(sum(num_new), 6, 20, generator=torch.Generator().manual_seed(2))
    decodes = Decodes(batch.block_tables, batch.context_lens, batch.query_starts, max(num_new))
    plan = plan_decode_twin(decodes, programs, len(num_new) + programs, 8, options.window)
    found = decode_attention_twin(q, cache, decodes, plan, options, scales)
    expected = prefill_attention_twin(q, cache, batch, options, scales)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_plan_fills_the_programs_with_equal_splits() -> None:
    lengths = torch.tensor([0, 1000, 64, 1], dtype=torch.int32)
    decodes = Decodes(torch.zeros(4, 1, dtype=torch.int32), lengths, torch.arange(5, dtype=torch.int32), 1)
    plan = plan_decode_twin(decodes, programs=8, capacity=12, slots=16)
    assert plan.split.tolist() == [9 * 16]  # 63 + 4 + 1 tiles among 8
    assert plan.starts.tolist() == [0, 0, 7, 8, 9]
    assert plan.work.tolist() == [1] * 7 + [2, 3] + [-1] * 3


def test_tiles_with_the_longest_walk_come_first() -> None:
    assert list_tiles([100, 40, 90], [1, 20, 9], first_seq=1, tokens=8, window=0) == [
        (2, 8),
        (2, 0),
        (1, 16),
        (1, 8),
        (1, 0),
    ]
    assert list_tiles([100, 40], [10, 8], first_seq=0, tokens=8, window=30) == [(0, 0), (1, 0), (0, 8)]
