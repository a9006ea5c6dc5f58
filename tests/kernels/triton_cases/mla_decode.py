import subprocess
import sys

import pytest
import torch

from diptych.kernels.attention.decode_plan import Decodes, plan_decode_twin
from diptych.kernels.common.tuning import CHIPS, chip_of
from diptych.kernels.mla import decode
from diptych.kernels.mla.decode import mla_decode_triton, mla_decode_twin, plan_mla_decode
from diptych.kernels.mla.hopper_latents import HopperLatents

from ...support.gpu.gluon_emulator import ORDERS, Emulated
from ...support.paged import make_batch, make_cache
from .common import DEVICE, DOT_DTYPES, Launch, assert_near, meta, normal

I32 = torch.int32
SPILLED_BYTES = 132  # by the kernel in Gluon, with Triton 3.9: workers then leave it; none with 3.6


def launch(heads: int, queries: int, dtype: torch.dtype = torch.bfloat16, *, is_gluon: bool = False) -> None:
    decodes = Decodes(meta(64, 128, dtype=I32), meta(64, dtype=I32), meta(65, dtype=I32), queries)
    cache = meta(256, 64, 576, dtype=dtype)
    q = meta(64 * queries, heads, 576, dtype=dtype)
    plan = plan_mla_decode(decodes, cache, heads, 512)
    other = HopperLatents() if is_gluon else None
    mla_decode_triton(q[..., :512], q[..., 512:], cache, decodes, plan, 0.1, other)


LAUNCHES = [
    Launch("bf16, 128 heads", lambda: launch(128, 1), spilled_bytes=144),
    Launch("bf16, 16 heads, 2 queries", lambda: launch(16, 2), is_gated=False),
    Launch("bf16, 16 heads, 4 queries", lambda: launch(16, 4), spilled_bytes=144, gated_targets=("sm_90",)),
    Launch("fp16, 16 heads", lambda: launch(16, 1, torch.float16), is_gated=False),
    Launch("fp32, 16 heads, 2 queries", lambda: launch(16, 2, torch.float32), spilled_bytes=16, is_gated=False),
    Launch("bf16, 128 heads, Gluon", lambda: launch(128, 1, is_gluon=True), ("sm_90",), spilled_bytes=SPILLED_BYTES),
]


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    ("context_lens", "num_new"), [([1], [1]), ([9, 1, 310, 64], [1, 1, 1, 1]), ([130, 3, 65], [4, 3, 1])]
)
@pytest.mark.parametrize(("num_heads", "block_size"), [(5, 5), (24, 16)])
def test_mla_decode(
    context_lens: list[int], num_new: list[int], num_heads: int, block_size: int, dtype: torch.dtype
) -> None:
    batch = make_batch(context_lens, num_new, block_size, 100, DEVICE)
    cache = make_cache(batch, 100, 1, 48, dtype)[:, 0, :, 0]
    lengths = batch.context_lens * (batch.context_lens != 64)  # a sequence of a padded graph has no context
    decodes = Decodes(batch.block_tables, lengths, batch.query_starts, max(num_new))
    q = normal(sum(num_new), num_heads, 50, dtype=dtype)
    queries = q[..., 1:33], q[..., 33:49]
    plan = plan_mla_decode(decodes, cache, num_heads, 32)
    found, expected = (run(*queries, cache, decodes, plan, 0.2) for run in (mla_decode_triton, mla_decode_twin))
    assert_near(found, expected)


IN_GLUON = """
import torch
from tests.kernels.triton_cases import mla_decode
mla_decode.check_gluon()
print("equal")
"""
CONTEXTS = [1, 0, 63, 64, 65, 127, 129, 700, 5000]


def check_gluon() -> None:
    """The kernel in Gluon against the twin: contexts around tiles, none at all, several tokens of a sequence."""
    kernel = HopperLatents()
    for num_heads, queries in ((128, 1), (64, 1), (80, 3)):
        lens = [max(n, queries) if n else 0 for n in CONTEXTS]
        batch = make_batch(lens, [queries] * len(lens), 16, 400, DEVICE)
        cache = make_cache(batch, 400, 1, 576, torch.bfloat16)[:, 0, :, 0]
        decodes = Decodes(batch.block_tables, batch.context_lens, batch.query_starts, queries)
        q = normal(queries * len(lens), num_heads, 576, dtype=torch.bfloat16)
        plan = plan_mla_decode(decodes, cache, num_heads, 512)
        rows = q[..., :512], q[..., 512:]
        assert kernel.takes(*rows, cache, decodes)
        found = kernel.attend(*rows, cache, decodes, plan, 0.05)
        assert_near(found, mla_decode_twin(*rows, cache, decodes, plan, 0.05))


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU it runs itself")
@pytest.mark.parametrize(("queries", "seed"), [(1, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("when", ORDERS)
def test_mla_decode_in_gluon_whatever_its_warps_order_is(
    queries: int, seed: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "chip_of", lambda _: CHIPS["h200"])
    lens, num_heads = [queries, 0, 65, 129, 700], 64 // queries
    batch = make_batch(lens, [queries] * len(lens), 16, 100, DEVICE)
    cache = make_cache(batch, 100, 1, 576, torch.bfloat16)[:, 0, :, 0]
    decodes = Decodes(batch.block_tables, batch.context_lens, batch.query_starts, queries)
    q, plan = normal(queries * len(lens), num_heads, 576, dtype=torch.bfloat16), plan_decode_twin(decodes, 3, 8, 64)
    kernel, rows = HopperLatents(), (q[..., :512], q[..., 512:])
    kernel._kernel = Emulated(kernel._kernel, seed, when)
    found = kernel.attend(*rows, cache, decodes, plan, 0.05)
    assert_near(found, mla_decode_twin(*rows, cache, decodes, plan, 0.05))


@pytest.mark.skipif(DEVICE == "cpu", reason="Gluon is not interpreted")
def test_mla_decode_in_gluon() -> None:
    """In a process of its own: where it waits for ever, the other tests do not."""
    if "sm_90" not in chip_of(torch.device(DEVICE)).kinds:
        pytest.skip("it is for sm_90")
    command = [sys.executable, "-c", IN_GLUON]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.endswith("equal\n"), done.stderr
