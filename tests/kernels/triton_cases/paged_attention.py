from dataclasses import replace

import pytest
import torch

from diptych.kernels.attention.paged_attention import paged_attention_triton, paged_attention_twin
from diptych.kernels.attention.paged_batch import AttentionOptions, PagedBatch

from ...support.paged import make_batch, make_cache
from .common import DEVICE, Launch, assert_near, meta, normal


def launch() -> None:
    batch = make_batch([300, 300], [1, 256], 16, 40, "meta")
    paged_attention_triton(meta(257, 32, 128), meta(40, 2, 16, 8, 128), batch)


LAUNCHES = [Launch("a decode and a chunk", launch, is_gated=False)]


def test_a_captured_batch_with_drafts() -> None:
    """Of which the host knows no context: as many sequences as rows, some of no tokens, one idle."""
    whole, on_cpu = (make_batch([40, 0, 0, 9, 0], [3, 0, 0, 1, 1], 5, 100, device) for device in (DEVICE, "cpu"))
    cache = make_cache(whole, 100, 2, 20, torch.float32)
    q = normal(5, 6, 20, dtype=torch.float32)
    captured = [
        replace(of, host_context_lens=[], host_num_new=[1] * 5, num_decodes=5, max_queries=4) for of in (whole, on_cpu)
    ]
    found = paged_attention_triton(q, cache, captured[0])
    assert not found[4].any()
    assert_near(found.cpu(), paged_attention_twin(q.cpu(), cache.cpu(), captured[1]))


@pytest.mark.parametrize(
    ("context_lens", "num_new"), [([9, 1, 71], [1, 1, 1]), ([33, 5, 20, 13], [1, 1, 7, 13]), ([20], [9])]
)
def test_decodes_and_chunks_of_one_batch(context_lens: list[int], num_new: list[int]) -> None:
    batch, on_cpu = (make_batch(context_lens, num_new, 5, 100, device) for device in (DEVICE, "cpu"))
    cache = make_cache(batch, 100, 2, 20, torch.float32)
    q = normal(sum(num_new), 9, 20, dtype=torch.float32)[:, 1:7]
    for _ in range(2):  # the second time with the data that the batch keeps for all layers
        found = paged_attention_triton(q, cache, batch)
        assert_near(found.cpu(), paged_attention_twin(q.cpu(), cache.cpu(), on_cpu))


class Sevens:
    """A PromptLibrary whose results are 7."""

    name = "sevens"

    def __init__(self, *, takes: bool) -> None:
        self._takes = takes

    def takes(self, *_: object) -> bool:
        return self._takes

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
        out: torch.Tensor,
        first_seq: int,
    ) -> None:
        out[first_seq:] = 7


@pytest.mark.parametrize("takes", [True, False])
def test_prompts_of_a_batch_with_a_library(takes: bool) -> None:
    """It attends for them, in what it takes; decodes are our kernel's."""
    batch, on_cpu = (make_batch([33, 5, 20], [1, 1, 7], 5, 100, device) for device in (DEVICE, "cpu"))
    cache = make_cache(batch, 100, 2, 20, torch.float32)
    q = normal(9, 6, 20, dtype=torch.float32)
    found = paged_attention_triton(q, cache, replace(batch, library=Sevens(takes=takes))).cpu()
    due = paged_attention_twin(q.cpu(), cache.cpu(), on_cpu)
    assert_near(found[:2], due[:2])
    if takes:
        assert (found[2:] == 7).all()
    else:
        assert_near(found, due)
