"""Latent attention: its two forms compute the same result from a paged cache that holds only latents."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.paged_batch import PagedBatch
from diptych.kernels.mla import latent_attention
from diptych.kernels.mla.prefill import MASK_BYTES, mla_prefill
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.models.checkpoint.weights import LayerWeights
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import LatentSpec, RopeSpec
from diptych.workers.models.layers import mla
from diptych.workers.models.layers.mla import absorbed, attend, expanded, expands

from ....support.largest import Largest
from ...conftest import CheckpointOf

SPEC = LatentSpec(num_heads=4, q_rank=0, kv_rank=24, nope_dim=8, rope_dim=4, value_dim=6, rope=RopeSpec(), scale=0.37)
BLOCK_SIZE = 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(spec: LatentSpec) -> LayerWeights:
    none = torch.empty(0)
    return LayerWeights(none, none, kv_b=normal(4 * (spec.nope_dim + spec.value_dim), spec.kv_rank) / 5)


def by_hand(spec: LatentSpec, weights: LayerWeights, q: Tensor, context: Tensor) -> Tensor:
    """One head and one query after the other, in float64."""
    assert weights.kv_b is not None
    latent, rope = context.double().split((spec.kv_rank, spec.rope_dim), dim=1)
    out = torch.empty(len(q), spec.num_heads, spec.value_dim)
    for head, rows in enumerate(weights.kv_b.double().chunk(spec.num_heads)):
        keys = torch.cat((latent @ rows[: spec.nope_dim].T, rope), dim=1)
        values = latent @ rows[spec.nope_dim :].T
        for t in range(len(q)):
            seen = len(context) - len(q) + t + 1
            scores = keys[:seen] @ q[t, head].double() * spec.scale
            out[t, head] = scores.softmax(0) @ values[:seen]
    return out


def batch_of(contexts: list[Tensor], num_new: list[int]) -> tuple[Tensor, PagedBatch]:
    """A layer's cache [blocks, 1, slots, 1, kv_dim], NaN where no sequence has a token, and the batch."""
    lens = [len(context) for context in contexts]
    width = -(-max(lens) // BLOCK_SIZE)
    order = torch.randperm(len(lens) * width, generator=torch.Generator().manual_seed(3))
    tables, starts = order.int().view(len(lens), width), torch.tensor([0, *num_new]).cumsum(0).int()
    pool = torch.full((len(order), 1, BLOCK_SIZE, 1, SPEC.kv_dim), torch.nan)
    for table, context in zip(tables, contexts, strict=True):
        for t, row in enumerate(context):
            pool[table[t // BLOCK_SIZE], 0, t % BLOCK_SIZE, 0] = row
    num_decodes = sum(num == 1 for num in num_new)
    return pool, PagedBatch(tables, torch.tensor(lens).int(), starts, lens, num_new, num_decodes, BLOCK_SIZE)


@pytest.mark.parametrize("value_dim", [6, 20])
@pytest.mark.parametrize(("num_new", "context_len"), [(2, 2), (7, 7), (5, 19)])
def test_both_forms_are_what_one_head_after_the_other_gives(num_new: int, context_len: int, value_dim: int) -> None:
    spec = replace(SPEC, value_dim=value_dim)
    weights, q = weights_of(spec), normal(num_new, 4, spec.q_dim, seed=1)
    context = normal(context_len, spec.kv_dim, seed=2)
    due = by_hand(spec, weights, q, context)
    pool, batch = batch_of([context], [num_new])
    for form in (expanded, absorbed):
        found = form(spec, weights, q, pool[:, 0, :, 0], batch, range(1))
        torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-5)


def test_a_long_context_is_expanded_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32,768 tokens, whose keys and values together would take 134 MB: no tensor is larger than the bound."""
    monkeypatch.setattr(mla, "EXPANDED_BYTES", 16 << 20)
    spec = replace(SPEC, num_heads=16, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32)
    weights = replace(weights_of(spec), kv_b=normal(16 * 64, 64) / 8)
    num_new, length = 250, 32_768  # a mask of all would take 33 MB
    q, latents = normal(num_new, 16, spec.q_dim, seed=1), normal(length // 16, 16, spec.kv_dim, seed=2)
    tables, lens = torch.arange(length // 16).int()[None], torch.tensor([length]).int()
    batch = PagedBatch(tables, lens, torch.tensor([0, num_new]).int(), [length], [num_new], 0, block_size=16)
    with Largest() as largest:
        found = expanded(spec, weights, q, latents, batch, range(1))
    assert 0 < largest.num_bytes <= max(16 << 20, MASK_BYTES)
    due = absorbed(spec, weights, q, latents, batch, range(1))
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("together", [0, 1 << 20])
def test_sequences_of_unlike_lengths_see_their_own_context_alone(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Four decodes, and chunks of both forms. together: bytes of contexts, of keys and values, of masks."""
    monkeypatch.setattr(latent_attention, "TOGETHER_BYTES", together)
    monkeypatch.setattr(mla, "EXPANDED_BYTES", together)
    monkeypatch.setattr("diptych.kernels.mla.prefill.MASK_BYTES", together)
    lens, num_new = [9, 1, 16, 6, 6, 21, 8, 17], [1, 1, 1, 1, 6, 5, 8, 2]
    assert [expands(SPEC, *of) for of in zip(num_new[4:], lens[4:], strict=True)] == [True, False, True, False]
    contexts = [normal(n, SPEC.kv_dim, seed=40 + i) for i, n in enumerate(lens)]
    pool, batch = batch_of(contexts, num_new)
    weights, q = weights_of(SPEC), normal(sum(num_new), 4, SPEC.q_dim, seed=5)
    queries = q.split(num_new)
    due = torch.cat([by_hand(SPEC, weights, *of) for of in zip(queries, contexts, strict=True)])
    torch.testing.assert_close(attend(SPEC, weights, q, pool, batch), due, rtol=1e-5, atol=1e-5)


def test_heads_that_are_expanded_at_once_are_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are not all, for calls of cuDNN have fixed numbers of heads."""
    asked: list[int] = []

    def noted(q: Tensor, *rest: Any) -> Tensor:
        asked.append(q.shape[1])
        return mla_prefill(q, *rest)

    spec, context = replace(SPEC, num_heads=40), normal(10, SPEC.kv_dim, seed=2)
    per_head = 10 * (spec.nope_dim + spec.value_dim) * 4
    weights = replace(weights_of(spec), kv_b=normal(40 * (spec.nope_dim + spec.value_dim), spec.kv_rank) / 5)
    pool, batch = batch_of([context], [10])
    q = normal(10, 40, spec.q_dim, seed=1)
    monkeypatch.setattr(mla, "mla_prefill", noted)
    for together, due in ((41, [40]), (40, [40]), (39, [32, 8]), (17, [16, 16, 8]), (15, [15, 15, 10])):
        monkeypatch.setattr(mla, "EXPANDED_BYTES", together * per_head)
        found = expanded(spec, weights, q, pool[:, 0, :, 0], batch, range(1))
        torch.testing.assert_close(found, by_hand(spec, weights, q, context), rtol=1e-5, atol=1e-5)
        assert asked == due
        asked.clear()


def test_the_form_is_the_one_of_fewer_multiplications() -> None:
    lite = replace(SPEC, num_heads=16, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)

    def fewest(num_new: int, context: int) -> bool:
        pairs = sum(context - num_new + t + 1 for t in range(num_new))
        through_latents = num_new * 512 * (128 + 128) + pairs * (512 + 64 + 512)
        return context * 512 * (128 + 128) + pairs * (128 + 64 + 128) <= through_latents

    cases = [(1, 1), (1, 4096), (16, 4096), (128, 8192), (200, 8192), (512, 8192), (2048, 2048)]
    assert [expands(lite, *case) for case in cases] == [fewest(*case) for case in cases]
    assert [expands(lite, *case) for case in cases] == [True, False, False, False, True, True, True]


def test_a_token_takes_the_latent_and_the_rotated_key_of_each_layer(checkpoint_of: CheckpointOf) -> None:
    """DeepSeek-V2, table 1: (d_c + d_h^R) l numbers a token."""
    path = checkpoint_of("deepseek-v2")
    runner = ModelRunner.load(WorkerConfig.of(path, dtype="bfloat16", threads=1, kv_memory_bytes=8 << 20))
    layout, spec = runner.layout, load_spec(path)
    runner.close()
    assert layout.block_bytes == layout.block_size * spec.num_layers * (32 + 8) * 2
    assert (layout.num_vectors, layout.packing) == (1, "rows")
