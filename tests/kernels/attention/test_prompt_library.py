"""FlashAttention 3 in place of our kernel: its released signature, by a fake that is as strict, and the choice."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention import prompt_library
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from diptych.kernels.attention.prefill_attention import prefill_attention_twin
from diptych.kernels.attention.prompt_library import FlashAttention3, faster_library, find_library
from diptych.kernels.common.tuning import CHIPS

from ...support.gpu.fake_flash_attention import make_package
from ...support.paged import make_batch, make_cache

HALF = torch.bfloat16


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FlashAttention3:
    monkeypatch.setitem(sys.modules, prompt_library.PACKAGE, make_package())
    monkeypatch.setattr(prompt_library, "chip_of", lambda _: CHIPS["h100"])
    found = find_library(torch.device("cpu"))
    assert found is not None
    return found


@pytest.mark.parametrize("options", [NO_OPTIONS, AttentionOptions(scale=0.3, softcap=5.0, window=7)])
@pytest.mark.parametrize(
    ("context_lens", "num_new"), [([33, 5, 20, 13], [1, 1, 7, 13]), ([20], [9]), ([40, 31], [40, 2])]
)
def test_prompts_get_what_our_kernel_gives(
    context_lens: list[int], num_new: list[int], options: AttentionOptions, library: FlashAttention3
) -> None:
    """Over a strided cache, NaN where no sequence has a token. Rows of decodes are not touched."""
    batch = make_batch(context_lens, num_new, 5, 100)
    cache = make_cache(batch, 100, 2, 16, HALF)
    q = torch.randn(sum(num_new), 9, 16, generator=torch.Generator().manual_seed(2)).to(HALF)[:, 1:7]
    assert library.takes(q, cache, options, None)
    due, first = prefill_attention_twin(q, cache, batch, options), batch.num_decodes
    for _ in range(2):  # the second time with what the batch keeps for all layers
        out = torch.full(q.shape, 7.0, dtype=HALF)
        library.attend(q, cache, batch, options, out, first)
        assert torch.equal(out[first:], due[first:]) and (out[:first] == 7).all()


def test_what_it_does_not_know_is_ours(library: FlashAttention3) -> None:
    q, cache = torch.zeros(3, 4, 64, dtype=HALF), torch.zeros(2, 2, 16, 2, 64, dtype=HALF)
    assert library.takes(q, cache, AttentionOptions(window=5), None)
    assert not library.takes(q, cache, AttentionOptions(sinks=torch.zeros(4)), None)
    assert not library.takes(q, cache.to(torch.int8), NO_OPTIONS, torch.zeros(2, 2, 16, 2))
    assert not library.takes(q.float(), cache.float(), NO_OPTIONS, None)
    for dim in (20, 512):
        assert not library.takes(q.new_zeros(3, 4, dim), cache.new_zeros(2, 2, 16, 2, dim), NO_OPTIONS, None)


def test_it_is_found_where_it_is_installed_and_knows_the_gpu(
    library: FlashAttention3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(prompt_library, "chip_of", lambda _: CHIPS["b200"])
    assert find_library(device) is None
    monkeypatch.setattr(prompt_library, "chip_of", lambda _: CHIPS["h200"])
    del sys.modules[prompt_library.PACKAGE].flash_attn_with_kvcache
    assert find_library(device) is None and "by FlashAttention 3: it does not load" in caplog.text
    monkeypatch.delitem(sys.modules, prompt_library.PACKAGE)
    assert find_library(device) is None


def twin(
    q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, scales: Tensor | None, out: Tensor
) -> None:
    out.copy_(prefill_attention_twin(q, cache, batch, options, scales))


def clock(own: float, other: float) -> Callable[[Callable[[], Any]], float]:
    """Runs what it is given, four times each, and returns these times for the two."""
    times = [9.0, own, own, own, 9.0, other, other, other]

    def seconds(work: Callable[[], Any]) -> float:
        work()
        return times.pop(0)

    return seconds


def test_the_faster_one_computes(
    library: FlashAttention3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(prompt_library, "prefill_attention_triton", twin)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(40, 4, 16, generator=generator).to(HALF)
    cache = torch.randn(3, 2, 16, 2, 16, generator=generator).to(HALF)
    assert faster_library(library, q, cache, clock(2e-3, 1e-3)) is library
    assert "by FlashAttention 3: 40 tokens take 1000 us, by our own kernel 2000 us" in caplog.text
    assert faster_library(library, q, cache, clock(1e-3, 2e-3)) is None
    assert "by our own kernel: 40 tokens take 1000 us, by FlashAttention 3 2000 us" in caplog.text
    assert faster_library(library, q.float(), cache.float(), clock(2e-3, 1e-3)) is None


@pytest.mark.parametrize("wrong", [0.1, float("nan")])
def test_one_that_gives_something_else_does_not_compute(
    wrong: float, library: FlashAttention3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def spoilt(*arguments: Any) -> None:
        twin(*arguments)
        arguments[-1][3, 1, 5] += wrong

    monkeypatch.setattr(prompt_library, "prefill_attention_triton", spoilt)
    q, cache = torch.zeros(40, 4, 16, dtype=HALF), torch.zeros(3, 2, 16, 2, 16, dtype=HALF)
    assert faster_library(library, q, cache, clock(2e-3, 1e-3)) is None
    assert "by FlashAttention 3: its results differ by" in caplog.text


def test_one_that_fails_does_not_compute(
    library: FlashAttention3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(prompt_library, "prefill_attention_triton", twin)
    monkeypatch.setattr(library, "_attend", fail)
    q, cache = torch.zeros(40, 4, 16, dtype=HALF), torch.zeros(3, 2, 16, 2, 16, dtype=HALF)
    assert faster_library(library, q, cache, clock(2e-3, 1e-3)) is None
    assert "by FlashAttention 3: it fails (no kernel image is available)" in caplog.text
