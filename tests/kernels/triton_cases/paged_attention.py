import pytest
import torch

from diptych.kernels.attention.paged_attention import paged_attention_triton, paged_attention_twin

from ...support.paged import make_batch, make_cache
from .common import DEVICE, Launch, assert_near, meta, normal


def launch() -> None:
    batch = make_batch([300, 300], [1, 256], 16, 40, "meta")
    paged_attention_triton(meta(257, 32, 128), meta(40, 2, 16, 8, 128), batch)


LAUNCHES = [Launch("a decode and a chunk", launch, is_gated=False)]


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
