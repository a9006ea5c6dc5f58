"""FlashAttention 3 in place of our kernel: its released signature, by a fake that is as strict."""

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.hopper_prompts import find_hopper_prompts
from diptych.kernels.attention.libraries import prompt_library
from diptych.kernels.attention.libraries.cudnn_calls import CudnnConfig, Sizes
from diptych.kernels.attention.libraries.cudnn_prompts import find_cudnn_prompts
from diptych.kernels.attention.libraries.prompt_library import FlashAttention3, find_library
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions, LatentPromptLibrary, PromptLibrary
from diptych.kernels.attention.prefill_attention import prefill_attention_twin
from diptych.kernels.common.tuning import CHIPS
from diptych.kernels.mla.cudnn_latents import find_cudnn_latents
from diptych.kernels.mla.prefill import Chunks, mla_prefill_twin

from ...support.gpu.fake_flash_attention import make_package
from ...support.paged import make_batch, make_cache

ROOT = Path(__file__).parents[3]
SHORT = Sizes.of(2048, 4096, CudnnConfig(least_new=100, least_pairs=5000, unit=256, most_piece=1024))
HALF = torch.bfloat16


@pytest.fixture
def package() -> str:
    return "flash_attn_interface"


@pytest.fixture
def library(package: str, monkeypatch: pytest.MonkeyPatch) -> FlashAttention3:
    monkeypatch.setitem(sys.modules, package, make_package(package))
    monkeypatch.setattr(prompt_library, "chip_of", lambda _: CHIPS["h100"])
    found = find_library(torch.device("cpu"))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("flash_attn_interface", NO_OPTIONS),
        ("flash_attn_interface", AttentionOptions(scale=0.3, softcap=5.0, window=7)),
        ("fa3_fwd_interface", NO_OPTIONS),
        ("fa3_fwd_interface", AttentionOptions(scale=0.3, softcap=5.0)),
    ],
)
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


@pytest.mark.parametrize("package", ["fa3_fwd_interface"])
def test_what_was_left_out_of_a_build_is_ours(library: FlashAttention3) -> None:
    q, cache = torch.zeros(3, 4, 64, dtype=HALF), torch.zeros(2, 2, 16, 2, 64, dtype=HALF)
    assert library.takes(q, cache, AttentionOptions(softcap=5.0), None)
    assert not library.takes(q, cache, AttentionOptions(window=5), None)
    assert not library.takes(q.half(), cache.half(), NO_OPTIONS, None)


def test_it_is_found_where_it_is_installed_and_knows_the_gpu(
    library: FlashAttention3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(prompt_library, "chip_of", lambda _: CHIPS["b200"])
    assert find_library(device) is None
    monkeypatch.setattr(prompt_library, "chip_of", lambda _: CHIPS["h200"])
    assert library.name == "FlashAttention 3 (flash_attn_interface)"
    del sys.modules["flash_attn_interface"].flash_attn_with_kvcache
    assert find_library(device) is None and "by flash_attn_interface: it does not load" in caplog.text
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    assert find_library(device) is None


@pytest.mark.parametrize("package", [build.package for build in prompt_library.BUILDS])
@pytest.mark.parametrize(("context_lens", "num_new"), [([20], [9]), ([40, 31], [40, 2])])
def test_latent_prompts_get_what_our_kernel_gives(
    context_lens: list[int], num_new: list[int], library: FlashAttention3
) -> None:
    generator = torch.Generator().manual_seed(4)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(HALF)

    num_all, chunks = sum(context_lens), Chunks(num_new, context_lens)
    q, keys, rope_keys = numbers(sum(num_new), 3, 192), numbers(num_all, 3, 128), numbers(num_all, 64)
    values = numbers(num_all, 3, 128)
    assert library.takes_latent(q, values) and not library.takes_latent(q.float(), values.float())
    assert not library.takes_latent(q[..., :96], values)
    due = mla_prefill_twin(q, keys, rope_keys, values, chunks, 0.1)
    found = library.attend_latent(q, keys, rope_keys, values, chunks, 0.1)
    assert (found.float() - due.float()).abs().max() < 2e-2


Library = TypeVar("Library", PromptLibrary, LatentPromptLibrary)

PAGED: dict[str, Callable[[torch.device], PromptLibrary | None]] = {
    "installed": find_library,
    "cuDNN": partial(find_cudnn_prompts, sizes=SHORT),
    "Hopper": find_hopper_prompts,
}
LATENT: dict[str, Callable[[torch.device], LatentPromptLibrary | None]] = {
    "installed": find_library,
    "cuDNN": partial(find_cudnn_latents, sizes=SHORT),
}


@functools.cache
def check_that_it_ends() -> None:
    """Launch the Hopper kernel in a process of its own: a barrier that is waited for in vain would end no test."""
    code = """
import torch
from diptych.kernels.attention.hopper_prompts import HopperPrompts
from diptych.kernels.attention.paged_batch import NO_OPTIONS
from tests.support.paged import make_batch, make_cache

batch = make_batch([400], [300], 16, 30, "cuda")
q, cache = torch.randn(300, 8, 128).to("cuda", torch.bfloat16), make_cache(batch, 30, 2, 128, torch.bfloat16)
HopperPrompts().attend(q, cache, batch, NO_OPTIONS, torch.empty_like(q), 0)
torch.cuda.synchronize()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def on_gpu(name: str, found: dict[str, Callable[[torch.device], Library | None]]) -> Library:
    if (library := found[name](torch.device("cuda"))) is None:
        pytest.skip("it does not attend for prompts here")
    if name == "Hopper":
        check_that_it_ends()
    return library


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("context_lens", "num_new"), [([1300, 5, 700, 513], [1, 1, 127, 513]), ([4096], [2048]), ([40, 31], [40, 2])]
)
def test_on_a_gpu_prompts_get_what_our_kernel_gives(
    context_lens: list[int], num_new: list[int], dim: int, window: int, name: str
) -> None:
    """NaN where no sequence has a token."""
    device, library, options = torch.device("cuda"), on_gpu(name, PAGED), AttentionOptions(window=window)
    on_host = make_batch(context_lens, num_new, 16, 1000)
    places = {name: getattr(on_host, name).to(device) for name in ("block_tables", "context_lens", "query_starts")}
    batch = replace(on_host, **places, plans={})
    cache = make_cache(on_host, 1000, 2, dim, HALF).to(device)
    q = torch.randn(sum(num_new), 8, dim, generator=torch.Generator().manual_seed(2)).to(device, HALF)
    if not library.takes(q, cache, options, None):
        pytest.skip("it knows no windows, or has no prompt that is long enough")
    due, first = prefill_attention_twin(q, cache, batch, options), batch.num_decodes
    out = torch.full(q.shape, 7.0, dtype=HALF, device=device)
    library.attend(q, cache, batch, options, out, first)
    error = (out[first:].float() - due[first:].float()).norm() / due[first:].float().norm()
    assert error < 1e-2 and (out[:first] == 7).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize(("context_lens", "num_new"), [([2000], [900]), ([400, 310], [400, 2])])
def test_on_a_gpu_latent_prompts_get_what_our_kernel_gives(
    context_lens: list[int], num_new: list[int], name: str
) -> None:
    device, library = torch.device("cuda"), on_gpu(name, LATENT)
    generator = torch.Generator(device).manual_seed(4)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(HALF)

    num_all = sum(context_lens)
    q, keys, rope_keys = numbers(sum(num_new), 16, 192), numbers(num_all, 16, 128), numbers(num_all, 64)
    values = numbers(num_all, 16, 128)
    due = mla_prefill_twin(q, keys, rope_keys, values, Chunks(num_new, context_lens), 0.1).float()
    found = library.attend_latent(q, keys, rope_keys, values, Chunks(num_new, context_lens), 0.1).float()
    assert (found - due).norm() / due.norm() < 1e-2
