"""Choice between our kernel of decodes over latents, one in Gluon and FlashMLA, by fakes: no GPU is needed."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.decode_plan import Decodes
from diptych.kernels.common import tuning
from diptych.kernels.common.untried import VARIABLE
from diptych.kernels.mla import hopper_latents
from diptych.kernels.mla.decode import mla_decode_twin
from diptych.kernels.mla.hopper_latents import HopperLatents, find_latents, knows
from diptych.kernels.mla.latent_library import FlashMla
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution.common import latent_choice
from diptych.workers.execution.common.timed_choice import Timed
from diptych.workers.execution.gpu import rank_steps, step_buffers

from ....support.gpu.fake_flash_mla import make_flash_mla
from ....support.gpu.serving import GREEDY, generate, late, load

ON = torch.device("cpu")
WANTED = "hopper-latents"


LATENTS = SimpleNamespace(num_heads=64, kv_rank=512, rope_dim=64, scale=0.1)


class Taking:
    """Attends as our kernel does, or otherwise, and notes the block size."""

    name = "a fake"

    def __init__(self, wrong: float = 0.0, takes: bool = True) -> None:
        self.wrong, self.is_taking, self.block_sizes = wrong, takes, list[int]()

    def takes(self, q_latent: Tensor, q_rope: Tensor, cache: Tensor, decodes: Decodes) -> bool:
        self.block_sizes.append(cache.shape[1])
        return self.is_taking

    def attend(self, *inputs: Any) -> Tensor:
        return mla_decode_twin(*inputs) + self.wrong


class Spilling(HopperLatents):
    """Attends as our kernel does, and says that it spills."""

    def __init__(self) -> None:
        self.spilled = 7

    def attend(self, *inputs: Any) -> Tensor:
        return mla_decode_twin(*inputs)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Each takes less time than the one before it."""

    def timed_on(lane: object) -> Timed:
        times = iter(float(100 - n) for n in range(100))
        return lambda work: (next(times), work())

    monkeypatch.setattr(latent_choice, "timed_on", timed_on)
    monkeypatch.setattr(latent_choice, "LatentSpec", SimpleNamespace)
    monkeypatch.setattr(latent_choice, "find_latents", lambda _: None)
    monkeypatch.setattr(latent_choice, "find_latent_library", lambda _: None)
    return monkeypatch


def chosen(block_size: int = 16) -> object:
    layers, embed = [SimpleNamespace(spec=SimpleNamespace(attention=LATENTS))], torch.ones(1, dtype=torch.bfloat16)
    decoder: Any = SimpleNamespace(layers=layers, weights=SimpleNamespace(embed=embed))
    cache: Any = SimpleNamespace(layout=SimpleNamespace(block_size=block_size))
    return latent_choice.choose_latents(FakeDevice().lane("main"), decoder, cache)


def test_the_faster_one_that_gives_the_same(faster: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert chosen() is None
    kernel = Taking()
    faster.setattr(latent_choice, "find_latents", lambda _: kernel)
    assert chosen() is kernel and kernel.block_sizes == [16]
    assert "decodes over latents are attended to by a fake" in caplog.text
    faster.setattr(latent_choice, "find_latents", lambda _: Taking(wrong=0.1))
    assert chosen() is None
    assert "decodes over latents are not attended to by a fake: its results differ by 0.1" in caplog.text
    faster.setattr(latent_choice, "find_latents", lambda _: Taking(takes=False))
    assert chosen() is None


def test_a_kernel_whose_registers_spill_is_not_taken(
    faster: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faster.setattr(latent_choice, "find_latents", lambda _: Spilling())
    assert chosen() is None
    assert "it fails (RuntimeError: 7 registers of a thread lie in memory)" in caplog.text


def test_flash_mla_is_compared_where_blocks_have_64_tokens(
    faster: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With contexts of all sorts, NaN beyond them."""
    caplog.set_level("INFO")
    faster.setitem(sys.modules, "flash_mla", make_flash_mla())
    library, kernel = FlashMla(), Taking()
    faster.setattr(latent_choice, "find_latent_library", lambda _: library)
    assert chosen(16) is None and "not attended to by FlashMLA: it asks for block_size=64" in caplog.text
    assert chosen(64) is library and "decodes over latents are attended to by FlashMLA" in caplog.text
    faster.setattr(latent_choice, "find_latents", lambda _: kernel)
    assert chosen(64) is kernel and chosen(16) is kernel


def test_what_it_takes() -> None:
    assert knows(64, 512, 64, torch.bfloat16)
    assert not any((knows(32, 512, 64, torch.bfloat16), knows(64, 256, 64, torch.bfloat16)))
    assert not knows(64, 512, 64, torch.float16)
    kernel = HopperLatents.__new__(HopperLatents)
    q, cache = (torch.empty(2, n, 576, dtype=torch.bfloat16, device="meta") for n in (64, 16))
    decodes: Any = None
    assert kernel.takes(q[..., :512], q[..., 512:], cache, decodes)
    odd = torch.empty(2, 64, 580, dtype=torch.bfloat16, device="meta")[..., :576]
    assert not kernel.takes(odd[..., :512], odd[..., 512:], cache, decodes)


def test_it_is_not_even_imported_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> HopperLatents:
        raise ImportError("no Gluon")

    fail.name = "a fake"  # type: ignore[attr-defined]
    monkeypatch.setattr(hopper_latents, "HopperLatents", fail)
    monkeypatch.setenv(tuning.DEVICE_VARIABLE, "h200")
    tuning.chip_of.cache_clear()
    try:
        monkeypatch.delenv(VARIABLE, raising=False)
        assert find_latents(ON) is None and not caplog.text
        monkeypatch.setenv(VARIABLE, WANTED)
        assert find_latents(ON) is None
        assert "not attended to by a fake: it does not load (no Gluon)" in caplog.text
    finally:
        tuning.chip_of.cache_clear()


def test_steps_are_given_what_was_chosen(latent_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs capture it: it is chosen before."""
    given, batch_of = list[object](), step_buffers.PagedBatch
    kernel = Taking(takes=False)

    def noting(*arguments: Any, **named: Any) -> object:
        given.append(named["latents"])
        return batch_of(*arguments, **named)

    monkeypatch.setattr(step_buffers, "PagedBatch", noting)
    monkeypatch.setattr(rank_steps, "choose_latents", lambda *_: kernel)
    generate(load(latent_of("deepseek-v3"), late(), max_batch_tokens=40), [[1, 2, 3, 4]], [GREEDY])
    assert given and set(given) == {kernel}
    assert "diptych.kernels.mla.decode_hopper" not in sys.modules
