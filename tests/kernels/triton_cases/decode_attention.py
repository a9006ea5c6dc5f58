import pytest
import torch

from diptych.kernels.attention.decode_attention import decode_attention_triton, decode_attention_twin
from diptych.kernels.attention.decode_plan import (
    DecodePlan,
    Decodes,
    decode_config,
    plan_decode,
    plan_decode_triton,
    plan_decode_twin,
)
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions
from diptych.kernels.common.tuning import chip_of

from ...support.paged import make_batch, make_cache
from .common import (
    DEVICE,
    DOT_DTYPES,
    FOLLOWING,
    Launch,
    assert_near,
    following,
    in_pool,
    meta,
    normal,
    scaled_layer,
)

FP8 = torch.float8_e4m3fn
I32 = torch.int32


def plan_of(decodes: Decodes, cache: torch.Tensor, window: int = 0) -> DecodePlan:
    return plan_decode(decodes, cache.shape[3], decode_config(chip_of(cache.device), cache), window)


def launch(
    dim: int = 128,
    queries: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    options: AttentionOptions = NO_OPTIONS,
    kv_heads: int = 8,
) -> None:
    decodes = Decodes(meta(64, 128, dtype=I32), meta(64, dtype=I32), meta(65, dtype=I32), queries)
    cache, scales = meta(256, 2, 16, kv_heads, dim, dtype=dtype), None
    if stored is not None:
        cache, scales = scaled_layer(256, 16, kv_heads, dim, stored, "meta")
    q = meta(64 * queries, 32, dim, dtype=dtype)
    decode_attention_triton(q, cache, decodes, plan_of(decodes, cache, options.window), options, scales)


def all_options(num_heads: int, device: str) -> AttentionOptions:
    sinks = torch.linspace(-1, 1, num_heads).to(device)
    return AttentionOptions(scale=0.3, softcap=5.0, window=19, sinks=sinks)


LAUNCHES = [
    Launch("bf16 d 128", launch),
    Launch("bf16 d 128, follows", following(launch), FOLLOWING, gated_targets=("sm_90",)),
    Launch(
        "int8 KV d 64, 16 queries, all options",
        lambda: launch(64, 16, stored=torch.int8, options=all_options(32, "meta")),
        spilled_bytes=8,
    ),
    Launch(
        "bf16 d 64, 16 queries, all options",
        lambda: launch(64, 16, options=all_options(32, "meta")),
        spilled_bytes=32,
        is_gated=False,
    ),
    Launch("bf16 d 128, 9 queries", lambda: launch(queries=9), spilled_bytes=24, gated_targets=("sm_90",)),
    Launch("bf16 d 256, 9 queries", lambda: launch(256, 9), is_gated=False),
    Launch("bf16 d 512, 4 queries", lambda: launch(512, 4, kv_heads=4), is_gated=False),
    Launch("fp32 d 128, 8 queries", lambda: launch(128, 8, torch.float32), is_gated=False),
    Launch("fp8 KV d 128", lambda: launch(stored=FP8), spilled_bytes=8, is_gated=False),
    Launch("int8 KV d 128", lambda: launch(stored=torch.int8), is_gated=False),
    Launch("int4 KV d 128", lambda: launch(stored=torch.uint8)),
    Launch("int4 KV d 128, 9 queries", lambda: launch(queries=9, stored=torch.uint8), spilled_bytes=4, is_gated=False),
    Launch(
        "int4 KV d 64, 16 queries, all options",
        lambda: launch(64, 16, stored=torch.uint8, options=all_options(32, "meta")),
        spilled_bytes=8,
        is_gated=False,
    ),
    Launch("int4 KV d 96", lambda: launch(96, stored=torch.uint8), is_gated=False),
    Launch("int4 KV d 256", lambda: launch(256, stored=torch.uint8), is_gated=False),
    Launch("fp16 d 256", lambda: launch(256, dtype=torch.float16), is_gated=False),
    Launch("bf16 d 512", lambda: launch(512, kv_heads=4, options=AttentionOptions(scale=1.0)), is_gated=False),
    Launch("fp8 e5m2 KV d 128", lambda: launch(stored=torch.float8_e5m2), spilled_bytes=8, is_gated=False),
    Launch("fp32 d 128", lambda: launch(128, dtype=torch.float32), is_gated=False),
    Launch("fp32 d 256", lambda: launch(256, dtype=torch.float32), is_gated=False),
    Launch("fp32 d 512", lambda: launch(512, dtype=torch.float32, kv_heads=4), gated_targets=("sm_90",)),
]
BATCHES: list[tuple[list[int], list[int]]] = [
    ([1], [1]),
    ([9, 1, 310, 64], [1, 1, 1, 1]),
    ([130, 3, 65, 16], [4, 3, 1, 2]),
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
    decodes = Decodes(batch.block_tables, batch.context_lens, batch.query_starts, max(num_new))
    q = normal(sum(num_new), num_heads + 3, dim, dtype=dtype)[:, 1 : num_heads + 1]
    plan = plan_of(decodes, cache, options.window)
    expected = decode_attention_twin(q, cache, decodes, plan, options, scales)
    assert_near(decode_attention_triton(q, cache, decodes, plan, options, scales), expected)


@pytest.mark.parametrize(("context_lens", "num_new"), BATCHES)
@pytest.mark.parametrize("heads", [(4, 4, 16, 8), (6, 2, 20, 16), (20, 1, 16, 5), (8, 1, 260, 16)])
def test_decode_attention(context_lens: list[int], num_new: list[int], heads: tuple[int, int, int, int]) -> None:
    check(context_lens, num_new, heads, DOT_DTYPES[0])


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("stored", [None, torch.int8, torch.uint8, FP8, torch.float8_e5m2])
def test_it_takes_every_dtype(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    check(*BATCHES[2], (4, 2, 20, 5), dtype, stored=stored)


@pytest.mark.parametrize("stored", [torch.int8, torch.uint8, FP8, torch.float8_e5m2])
def test_bytes_of_heads_that_fill_their_tile(stored: torch.dtype) -> None:
    check(*BATCHES[1], (8, 2, 128, 16), DOT_DTYPES[1], stored=stored)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 256])
def test_4_bits_of_other_heads(dim: int) -> None:
    check(*BATCHES[2], (4, 2, dim, 8), DOT_DTYPES[1], stored=torch.uint8)


@pytest.mark.parametrize("window", [1, 16, 19, 200])
def test_window(window: int) -> None:
    check(*BATCHES[2], (4, 2, 16, 8), torch.float32, AttentionOptions(window=window))


@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
@pytest.mark.parametrize(("context_lens", "num_new"), BATCHES[1:])
def test_all_options_at_once(context_lens: list[int], num_new: list[int], stored: torch.dtype) -> None:
    check(context_lens, num_new, (6, 2, 20, 5), torch.float32, all_options(6, DEVICE), stored)


def test_each_kv_head_may_have_blocks_of_its_own() -> None:
    batch = make_batch([40, 21], [1, 1], 8, 100, DEVICE)
    cache = torch.randn(100, 2, 8, 2, 16, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    tables = torch.randperm(100, generator=torch.Generator().manual_seed(6))[:20].view(2, 2, 5).int().to(DEVICE)
    decodes = Decodes(tables, batch.context_lens, batch.query_starts, 1)
    q = normal(2, 4, 16, dtype=torch.float32)
    plan = plan_of(decodes, cache)
    found = decode_attention_triton(q, cache, decodes, plan)
    assert_near(found, decode_attention_twin(q, cache, decodes, plan))


def test_sequences_of_no_context_give_zeros() -> None:
    batch = make_batch([200, 8], [1, 1], 8, 100, DEVICE)
    cache = make_cache(batch, 100, 2, 16, torch.float32)
    lengths = torch.tensor([200, 0], dtype=I32, device=DEVICE)
    decodes = Decodes(batch.block_tables, lengths, batch.query_starts, 1)
    plan = plan_of(decodes, cache)
    q = normal(2, 4, 16, dtype=torch.float32)
    out = decode_attention_triton(q, cache, decodes, plan)
    assert not out[1].any()
    assert_near(out, decode_attention_twin(q, cache, decodes, plan))


@pytest.mark.parametrize("window", [0, 19])
def test_pieces_of_drafts(window: int) -> None:
    """As graphs of steps with drafts have them: sequences of no tokens between others, and idle rows."""
    contexts, starts = [200, 0, 0, 8, 3, 0, 0], [0, 3, 3, 3, 4, 6, 6, 7]
    num_new = [3, 0, 0, 1, 2, 0, 1]
    batch = make_batch(contexts, num_new, 8, 100, DEVICE)
    cache = make_cache(batch, 100, 2, 16, torch.float32)
    decodes = Decodes(batch.block_tables, batch.context_lens, torch.tensor(starts, dtype=I32, device=DEVICE), 3)
    plan = plan_of(decodes, cache, window)
    q, options = normal(7, 4, 16, dtype=torch.float32), AttentionOptions(window=window)
    out = decode_attention_triton(q, cache, decodes, plan, options)
    assert not out[6].any()
    assert_near(out, decode_attention_twin(q, cache, decodes, plan, options))


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("context_lens", [[1], [0, 700, 3], [1000, 0, 1, 64, 65, 999, 500]])
def test_plan(context_lens: list[int], window: int) -> None:
    lengths = torch.tensor(context_lens, dtype=I32, device=DEVICE)
    starts = torch.arange(len(context_lens) + 1, dtype=I32, device=DEVICE)
    decodes = Decodes(torch.zeros(len(context_lens), 1, dtype=I32, device=DEVICE), lengths, starts, 1)
    found, expected = (
        run(decodes, 5, len(context_lens) + 5, 16, window) for run in (plan_decode_triton, plan_decode_twin)
    )
    for part in ("work", "starts", "split"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), part
