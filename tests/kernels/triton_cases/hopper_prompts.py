"""The Hopper kernel of prompts, which is emulated: Gluon's kernels run on GPUs alone."""

from dataclasses import replace

import pytest
import torch

from diptych.kernels.attention import hopper_prompts
from diptych.kernels.attention.hopper_prompts import CONFIGS, HopperPrompts
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions
from diptych.kernels.attention.prefill_attention import prefill_attention_twin
from diptych.kernels.common.tuning import CHIPS

from ...support.gpu.gluon_emulator import ORDERS, Emulated
from ...support.paged import make_batch, make_cache
from .common import DEVICE, Launch, assert_near, meta, normal


def launch(
    which: int = 0,
    dim: int = 128,
    block_size: int = 16,
    heads: tuple[int, int] = (32, 8),
    options: AttentionOptions = NO_OPTIONS,
) -> None:
    batch = make_batch([3000, 700], [1000, 700], block_size, 4096 // block_size, "meta")
    cache, q = meta(256, 2, block_size, heads[1], dim), meta(1700, heads[0], dim)
    kernel = HopperPrompts(CONFIGS[which])
    assert kernel.takes(q, cache, options, None)
    kernel.attend(q, cache, batch, options, torch.empty_like(q), 0)


HOPPER = ("sm_90",)
WINDOW = AttentionOptions(window=1000)
# What is looked up once for each tile of queries is spilled; nothing within the loops over tiles of slots.
LAUNCHES = [
    Launch("d 128", launch, HOPPER, spilled_bytes=80),
    Launch("d 128 in turns", lambda: launch(1), HOPPER, spilled_bytes=80, is_gated=False),
    Launch("d 128, 64 slots", lambda: launch(2), HOPPER, spilled_bytes=80, is_gated=False),
    Launch("d 128, window", lambda: launch(options=WINDOW), HOPPER, spilled_bytes=80, is_gated=False),
    Launch("d 64, blocks of 8", lambda: launch(0, 64, 8), HOPPER, spilled_bytes=80, is_gated=False),
    Launch("d 128, blocks of 256", lambda: launch(0, 128, 256, (6, 2)), HOPPER, spilled_bytes=80, is_gated=False),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU it runs itself")
@pytest.mark.parametrize("which", range(len(CONFIGS)))
@pytest.mark.parametrize("when", ORDERS)
@pytest.mark.parametrize(
    ("lens", "num_new", "heads", "block_size", "window"),
    [([300, 20], [300, 9], (2, 1, 64), 16, 0), ([400], [60], (3, 1, 128), 8, 100), ([200], [130], (5, 1, 64), 256, 0)],
)
def test_prompts_whatever_the_order_of_its_warps_is(
    lens: list[int],
    num_new: list[int],
    heads: tuple[int, int, int],
    block_size: int,
    window: int,
    when: str,
    which: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NaN behind the contexts. Two programs take turns at all tiles."""
    monkeypatch.setattr(hopper_prompts, "chip_of", lambda _: replace(CHIPS["h200"], num_cores=2))
    (num_heads, num_kv_heads, dim), half, options = heads, torch.bfloat16, AttentionOptions(window=window)
    batch = make_batch(lens, num_new, block_size, 100, DEVICE)
    cache = make_cache(batch, 100, num_kv_heads, dim, half)
    q, kernel = normal(sum(num_new), num_heads, dim, dtype=half), HopperPrompts(CONFIGS[which])
    kernel._kernel = Emulated(kernel._kernel, which, when)
    assert kernel.takes(q, cache, options, None)
    out = torch.empty_like(q)
    kernel.attend(q, cache, batch, options, out, 0)
    assert_near(out, prefill_attention_twin(q, cache, batch, options))
