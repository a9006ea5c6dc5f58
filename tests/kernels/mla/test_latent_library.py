"""FlashMLA in place of our kernel of decodes over latents: its released signatures, by a fake that is as strict."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.decode_plan import Decodes
from diptych.kernels.attention.paged_batch import PagedBatch
from diptych.kernels.common.tuning import CHIPS
from diptych.kernels.mla import latent_attention, latent_library
from diptych.kernels.mla.decode import mla_decode_twin, plan_mla_decode
from diptych.kernels.mla.latent_attention import latent_attention_triton, latent_attention_twin
from diptych.kernels.mla.latent_library import FlashMla, find_latent_library

from ...support.gpu.fake_flash_mla import make_flash_mla
from ...support.paged import make_batch, make_cache

ON, HALF, RANK = torch.device("cpu"), torch.bfloat16, 512
LENGTHS = [1, 64, 65, 0, 130]


@pytest.fixture(params=[False, True], ids=["later interface", "first interface"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashMla:
    monkeypatch.setitem(sys.modules, "flash_mla", make_flash_mla(is_first=request.param))
    monkeypatch.setattr(latent_library, "chip_of", lambda _: CHIPS["h100"])
    found = find_latent_library(ON)
    assert found is not None
    return found


def inputs_of(lengths: list[int], block_size: int = 64) -> tuple[Tensor, Tensor, PagedBatch]:
    """(queries [S, 3, 576], a strided cache [blocks, block_size, 576], batch): NaN where no sequence has a token."""
    batch = make_batch(lengths, [1] * len(lengths), block_size, 40)
    cache = make_cache(batch, 40, 1, 576, HALF)[:, 0, :, 0]
    q = torch.randn(len(lengths), 3, 576, generator=torch.Generator().manual_seed(1)).to(HALF)
    return q, cache, batch


def decodes_of(batch: PagedBatch) -> Decodes:
    return Decodes(batch.block_tables, batch.context_lens, batch.query_starts, batch.max_queries)


def test_decodes_get_what_our_kernel_gives(library: FlashMla) -> None:
    q, cache, batch = inputs_of(LENGTHS)
    decodes, queries = decodes_of(batch), (q[..., :RANK], q[..., RANK:])
    plan = plan_mla_decode(decodes, cache, 3, RANK)
    assert library.takes(*queries, cache, decodes)
    due = mla_decode_twin(*queries, cache, decodes, plan, 0.1)
    for _ in range(2):  # the second time with what is kept for all layers
        found = library.attend(*queries, cache, decodes, plan, 0.1)
        assert torch.equal(found, due) and found.is_contiguous() and not found[3].any()
    [(metadata, _)] = decodes.plans.values()
    assert isinstance(metadata, Tensor) or metadata.num_calls == 2


def test_a_step_is_attended_to_by_it_in_what_it_takes(library: FlashMla, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes are; prompts, and drafted rows that attend together, are not."""
    ours: list[int] = []

    def by_twin(q_latent: Tensor, *rest: object) -> Tensor:
        ours.append(len(q_latent))
        return mla_decode_twin(q_latent, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(latent_attention, "mla_decode_triton", by_twin)
    batch = replace(make_batch([70, 3, 90], [1, 1, 20], 64, 40), latents=library)
    cache = make_cache(batch, 40, 1, 576, HALF)[:, 0, :, 0]
    q = torch.randn(22, 3, 576, generator=torch.Generator().manual_seed(1)).to(HALF)
    for sequences, rows, num_ours in ((range(2), slice(2), 0), (range(2, 3), slice(2, 22), 20)):
        queries = q[rows, :, :RANK], q[rows, :, RANK:]
        found = latent_attention_triton(*queries, cache, batch, sequences, 0.1)
        due = latent_attention_twin(*queries, cache, batch, sequences, 0.1)
        torch.testing.assert_close(found, due, rtol=2e-2, atol=2e-2)
        assert sum(ours) == num_ours
    drafts = replace(batch, max_queries=2, plans={})
    latent_attention_triton(q[:2, :, :RANK], q[:2, :, RANK:], cache, drafts, range(2), 0.1)
    assert sum(ours) == 22


def test_what_it_does_not_know_is_ours(library: FlashMla) -> None:
    q, cache, batch = inputs_of(LENGTHS)
    decodes, queries = decodes_of(batch), (q[..., :RANK], q[..., RANK:])
    assert library.takes(*queries, cache, decodes)
    assert not library.takes(q[..., :256], q[..., RANK:], cache, decodes)
    assert not library.takes(q[..., :RANK], q[..., :32], cache, decodes)
    assert not library.takes(queries[0].float(), queries[1].float(), cache.float(), decodes)
    assert not library.takes(*queries, cache, replace(decodes, max_queries=2))
    assert not library.takes(q[:2, :, :RANK], q[:2, :, RANK:], cache, decodes)
    odd = torch.zeros(40, 64, 580, dtype=HALF)[..., :576]
    assert not library.takes(*queries, odd, decodes)
    q, cache, batch = inputs_of(LENGTHS, 16)
    assert not library.takes(q[..., :RANK], q[..., RANK:], cache, decodes_of(batch))


def test_it_is_found_where_it_is_installed_and_knows_the_gpu(
    library: FlashMla, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert library.name == "FlashMLA"
    monkeypatch.setattr(latent_library, "chip_of", lambda _: CHIPS["b200"])
    assert find_latent_library(ON) is None
    monkeypatch.setattr(latent_library, "chip_of", lambda _: CHIPS["h200"])
    del sys.modules["flash_mla"].get_mla_metadata
    assert find_latent_library(ON) is None and "by flash_mla: it does not load" in caplog.text
    monkeypatch.delitem(sys.modules, "flash_mla")
    assert find_latent_library(ON) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("lengths", [LENGTHS, [2100, 0, 4096, 63], [1]])
def test_on_a_gpu_decodes_get_what_our_kernel_gives(lengths: list[int]) -> None:
    """NaN where no sequence has a token."""
    device = torch.device("cuda")
    if (library := find_latent_library(device)) is None:
        pytest.skip("it does not attend here")
    batch = make_batch(lengths, [1] * len(lengths), 64, 120, "cuda")
    cache = make_cache(batch, 120, 1, 576, HALF)[:, 0, :, 0]
    q = torch.randn(len(lengths), 16, 576, generator=torch.Generator().manual_seed(1)).to(device, HALF)
    decodes, queries = decodes_of(batch), (q[..., :RANK], q[..., RANK:])
    plan = plan_mla_decode(decodes, cache, 16, RANK)
    assert library.takes(*queries, cache, decodes)
    due = mla_decode_twin(*queries, cache, decodes, plan, 0.1)
    torch.testing.assert_close(library.attend(*queries, cache, decodes, plan, 0.1), due, rtol=2e-2, atol=2e-2)
