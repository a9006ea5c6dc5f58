"""The Hopper kernel of prompts, which is not interpreted: Gluon's kernels run on GPUs alone."""

import torch

from diptych.kernels.attention.hopper_prompts import CONFIGS, HopperPrompts
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions

from ...support.paged import make_batch
from .common import Launch, meta


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
