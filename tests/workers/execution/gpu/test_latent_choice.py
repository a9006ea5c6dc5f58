"""Choice between our kernel of decodes over latents and one in Gluon, by fakes: there is no GPU that would run it."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.common import tuning
from diptych.kernels.common.untried import VARIABLE
from diptych.kernels.mla import hopper_latents
from diptych.kernels.mla.hopper_latents import HopperLatents, find_latents, knows
from diptych.workers.execution.common import latent_choice
from diptych.workers.execution.common.timed_choice import Timed
from diptych.workers.execution.gpu import rank_steps, step_buffers

from ....support.gpu.serving import GREEDY, generate, late, load

ON = torch.device("cpu")
WANTED = "hopper-latents"


class Taking:
    """Attends as our kernel does, or otherwise, and says that it spills."""

    name = "a fake"

    def __init__(self, wrong: float = 0.0, spilled: int = 0) -> None:
        self.wrong, self.spilled = wrong, spilled


def chosen(kernel: Taking | None, monkeypatch: pytest.MonkeyPatch, heads: int = 64) -> object:
    """What is chosen where our kernel takes longer."""

    def attend(spec: object, like: Tensor) -> Callable[[Taking | None], Tensor]:
        return lambda other: torch.ones(2) if other is None else torch.ones(2) + other.wrong

    def timed_on(lane: object) -> Timed:
        times = [2.0] * 4 + [1.0] * 4
        return lambda work: (times.pop(0), work())

    monkeypatch.setattr(latent_choice, "find_latents", lambda _: kernel)
    monkeypatch.setattr(latent_choice, "_attend", attend)
    monkeypatch.setattr(latent_choice, "timed_on", timed_on)
    monkeypatch.setattr(latent_choice, "LatentSpec", SimpleNamespace)
    spec = SimpleNamespace(num_heads=heads, kv_rank=512, rope_dim=64)
    layers, embed = [SimpleNamespace(spec=SimpleNamespace(attention=spec))], torch.ones(1, dtype=torch.bfloat16)
    decoder: Any = SimpleNamespace(layers=layers, weights=SimpleNamespace(embed=embed))
    device: Any = SimpleNamespace(torch_device=ON, synchronize=lambda: None)
    return latent_choice.choose_latents(device, device, decoder)


def test_the_faster_one_that_gives_the_same(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    kernel = Taking()
    assert chosen(kernel, monkeypatch) is kernel
    assert "decodes over latents are attended to by a fake" in caplog.text
    assert chosen(Taking(wrong=0.1), monkeypatch) is None
    assert "decodes over latents are not attended to by a fake: its results differ by 0.1" in caplog.text
    assert chosen(Taking(spilled=7), monkeypatch) is None
    assert "it fails (RuntimeError: 7 registers of a thread lie in memory)" in caplog.text
    assert chosen(None, monkeypatch) is chosen(kernel, monkeypatch, heads=32) is None


def test_what_it_takes() -> None:
    assert knows(64, 512, 64, torch.bfloat16)
    assert not any((knows(32, 512, 64, torch.bfloat16), knows(64, 256, 64, torch.bfloat16)))
    assert not knows(64, 512, 64, torch.float16)
    kernel = HopperLatents.__new__(HopperLatents)
    q, cache = (torch.empty(2, n, 576, dtype=torch.bfloat16, device="meta") for n in (64, 16))
    assert kernel.takes(q[..., :512], q[..., 512:], cache)
    odd = torch.empty(2, 64, 580, dtype=torch.bfloat16, device="meta")[..., :576]
    assert not kernel.takes(odd[..., :512], odd[..., 512:], cache)


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
    kernel = Taking()
    kernel.takes = lambda *_: False  # type: ignore[attr-defined]

    def noting(*arguments: Any, **named: Any) -> object:
        given.append(named["latents"])
        return batch_of(*arguments, **named)

    monkeypatch.setattr(step_buffers, "PagedBatch", noting)
    monkeypatch.setattr(rank_steps, "choose_latents", lambda *_: kernel)
    generate(load(latent_of("deepseek-v3"), late(), max_batch_tokens=40), [[1, 2, 3, 4]], [GREEDY])
    assert given and set(given) == {kernel}
    assert "diptych.kernels.mla.decode_hopper" not in sys.modules
