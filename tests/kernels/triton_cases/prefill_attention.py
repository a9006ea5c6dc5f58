import pytest
import torch

from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions
from diptych.kernels.attention.prefill_attention import prefill_attention_triton, prefill_attention_twin

from ...support.paged import make_batch, make_cache
from .common import DEVICE, DOT_DTYPES, Launch, assert_near, in_pool, meta, normal, scaled_layer

FP8 = torch.float8_e4m3fn


def launch(
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    options: AttentionOptions = NO_OPTIONS,
    kv_heads: int = 8,
) -> None:
    batch = make_batch([3000, 700], [1000, 700], 16, 256, "meta")
    cache, scales = meta(256, 2, 16, kv_heads, dim, dtype=dtype), None
    if stored is not None:
        cache, scales = scaled_layer(256, 16, kv_heads, dim, stored, "meta")
    prefill_attention_triton(meta(1700, 32, dim, dtype=dtype), cache, batch, options, scales)


def all_options(num_heads: int, device: str) -> AttentionOptions:
    sinks = torch.linspace(-1, 1, num_heads).to(device)
    return AttentionOptions(scale=0.3, softcap=5.0, window=19, sinks=sinks)


LAUNCHES = [
    Launch("bf16 d 128", launch),
    Launch(
        "fp8 KV d 64, all options", lambda: launch(64, stored=FP8, options=all_options(32, "meta")), spilled_bytes=32
    ),
    Launch(
        "bf16 d 64, all options", lambda: launch(64, options=all_options(32, "meta")), spilled_bytes=32, is_gated=False
    ),
    Launch("fp8 KV d 128", lambda: launch(stored=FP8), is_gated=False),
    Launch("int8 KV d 128", lambda: launch(stored=torch.int8), spilled_bytes=32, is_gated=False),
    Launch("int4 KV d 128", lambda: launch(stored=torch.uint8)),
    Launch(
        "int4 KV d 64, all options",
        lambda: launch(64, stored=torch.uint8, options=all_options(32, "meta")),
        is_gated=False,
    ),
    Launch("int4 KV d 96", lambda: launch(96, stored=torch.uint8), is_gated=False),
    Launch("int4 KV d 256", lambda: launch(256, stored=torch.uint8), spilled_bytes=36, is_gated=False),
    Launch("fp16 d 256", lambda: launch(256, torch.float16), spilled_bytes=160, is_gated=False),
    Launch("bf16 d 256", lambda: launch(256), ("sm_89",)),
    Launch("bf16 d 512", lambda: launch(512, kv_heads=4, options=AttentionOptions(scale=1.0)), is_gated=False),
    Launch("fp8 e5m2 KV d 128", lambda: launch(stored=torch.float8_e5m2), is_gated=False),
    Launch("bf16 d 96", lambda: launch(96), is_gated=False),
    Launch("fp32 d 128", lambda: launch(128, torch.float32), is_gated=False),
    Launch("fp32 d 256", lambda: launch(256, torch.float32), is_gated=False),
    Launch("fp32 d 512", lambda: launch(512, torch.float32, kv_heads=4), gated_targets=("sm_90",)),
]
BATCHES: list[tuple[list[int], list[int]]] = [
    ([1], [1]),
    ([33, 5, 20, 13], [1, 1, 7, 13]),
    ([70, 90, 40], [70, 25, 16]),
]


def check(
    context_lens: list[int],
    num_new: list[int],
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    options: AttentionOptions = NO_OPTIONS,
    stored: torch.dtype | None = None,
) -> None:
    num_heads, num_kv_heads, dim, block_size = heads
    batch = make_batch(context_lens, num_new, block_size, 100, DEVICE)
    cache, scales = make_cache(batch, 100, num_kv_heads, dim, dtype), None
    if stored is not None:
        cache, scales = in_pool(cache, stored)
    q = normal(sum(num_new), num_heads + 3, dim, dtype=dtype)[:, 1 : num_heads + 1]
    expected = prefill_attention_twin(q, cache, batch, options, scales)
    assert_near(prefill_attention_triton(q, cache, batch, options, scales), expected)


@pytest.mark.parametrize(("context_lens", "num_new"), BATCHES)
@pytest.mark.parametrize("heads", [(4, 4, 16, 8), (6, 2, 20, 32), (8, 1, 260, 16)])
def test_prefill_attention(context_lens: list[int], num_new: list[int], heads: tuple[int, int, int, int]) -> None:
    check(context_lens, num_new, heads, DOT_DTYPES[0])


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("stored", [None, torch.int8, torch.uint8, FP8, torch.float8_e5m2])
def test_it_takes_every_dtype(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    check(*BATCHES[1], (4, 2, 20, 5), dtype, stored=stored)


@pytest.mark.parametrize("stored", [torch.int8, torch.uint8, FP8, torch.float8_e5m2])
def test_bytes_of_heads_that_fill_their_tile(stored: torch.dtype) -> None:
    check(*BATCHES[2], (8, 2, 128, 16), DOT_DTYPES[1], stored=stored)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 256])
def test_4_bits_of_other_heads(dim: int) -> None:
    check(*BATCHES[1], (4, 2, dim, 8), DOT_DTYPES[1], stored=torch.uint8)


@pytest.mark.parametrize("window", [1, 8, 16, 19, 100])
def test_window(window: int) -> None:
    check(*BATCHES[2], (4, 2, 16, 8), torch.float32, AttentionOptions(window=window))


@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
def test_all_options_at_once(stored: torch.dtype) -> None:
    check(*BATCHES[1], (6, 2, 20, 5), torch.float32, all_options(6, DEVICE), stored)


def test_it_writes_the_rows_of_its_sequences_alone() -> None:
    batch = make_batch([33, 20], [1, 7], 8, 100, DEVICE)
    cache = make_cache(batch, 100, 2, 16, torch.float32)
    q = normal(8, 4, 16, dtype=torch.float32)
    out = torch.zeros(8, 2, 4, 16, device=DEVICE)[:, 1]
    assert prefill_attention_triton(q, cache, batch, out=out, first_seq=1) is out
    assert not out[0].any()
    assert_near(out[1:], prefill_attention_twin(q, cache, batch)[1:])
