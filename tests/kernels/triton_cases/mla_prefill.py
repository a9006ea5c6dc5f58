import pytest
import torch

from diptych.kernels.mla.prefill import Chunks, mla_prefill_triton, mla_prefill_twin

from .common import DEVICE, DOT_DTYPES, Launch, assert_near, meta, normal


def launch(dtype: torch.dtype = torch.bfloat16) -> None:
    chunks = Chunks([1000, 700], [3000, 700])
    keys, values = meta(3700, 128, 256, dtype=dtype).chunk(2, dim=2)
    rope_keys = meta(3700, 576, dtype=dtype)[:, 512:]
    mla_prefill_triton(meta(1700, 128, 192, dtype=dtype), keys, rope_keys, values, chunks, 0.1)


LAUNCHES = [
    Launch("bf16", launch, spilled_bytes=16),
    Launch("fp16", lambda: launch(torch.float16), spilled_bytes=16, is_gated=False),
    Launch("fp32", lambda: launch(torch.float32), spilled_bytes=320, is_gated=False),
]


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("num_new", "context_lens"), [([1], [1]), ([7, 20, 1], [40, 20, 17])])
def test_mla_prefill(num_new: list[int], context_lens: list[int], dtype: torch.dtype) -> None:
    num_rows, num_slots = sum(num_new), sum(context_lens)
    q = normal(num_rows, 3, 53, dtype=dtype)[..., 5:]
    keys, values = normal(num_slots, 3, 64, dtype=dtype, seed=1).chunk(2, dim=2)
    rope_keys = normal(num_slots, 20, dtype=dtype, seed=2)[:, 4:]
    arguments = (q, keys, rope_keys, values, Chunks(num_new, context_lens), 0.2)
    of_host = (of.cpu() if isinstance(of, torch.Tensor) else of for of in arguments)
    assert_near(mla_prefill_triton(*arguments), mla_prefill_twin(*of_host).to(DEVICE))
