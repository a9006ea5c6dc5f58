"""The Hopper kernel of prompts, as far as no GPU is needed: what it takes, and where it is found."""

import subprocess
import sys

import pytest
import torch

from diptych.kernels.attention import hopper_prompts
from diptych.kernels.attention.hopper_prompts import HopperPrompts, find_hopper_prompts, wanted_hopper_prompts
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions
from diptych.kernels.common.tuning import CHIPS
from diptych.kernels.common.untried import VARIABLE

HALF = torch.bfloat16
CUDA = torch.device("cuda")


@pytest.fixture
def kernel() -> HopperPrompts:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    return HopperPrompts()


def takes(kernel: HopperPrompts, block_size: int = 16, dim: int = 128, heads: tuple[int, int] = (8, 2)) -> bool:
    q, cache = (torch.zeros(*shape, dtype=HALF) for shape in ((3, heads[0], dim), (2, 2, block_size, heads[1], dim)))
    return kernel.takes(q, cache, NO_OPTIONS, None)


def test_what_it_does_not_know_is_not_its_own(kernel: HopperPrompts) -> None:
    q, cache = torch.zeros(3, 4, 64, dtype=HALF), torch.zeros(2, 2, 16, 2, 64, dtype=HALF)
    assert kernel.takes(q, cache, AttentionOptions(scale=0.3, window=5), None)
    assert not kernel.takes(q, cache, AttentionOptions(sinks=torch.zeros(4)), None)
    assert not kernel.takes(q, cache, AttentionOptions(softcap=5.0), None)
    assert not kernel.takes(q, cache.to(torch.int8), NO_OPTIONS, torch.zeros(2, 2, 16, 2))
    assert not kernel.takes(q.half(), cache.half(), NO_OPTIONS, None)


def test_boxes_fit_blocks(kernel: HopperPrompts) -> None:
    assert [size for size in (1, 4, 8, 16, 24, 64, 128, 256, 1024) if takes(kernel, size)] == [
        8, 16, 64, 128, 256, 1024,
    ]  # fmt: skip
    assert [dim for dim in (32, 64, 96, 128, 256) if takes(kernel, dim=dim)] == [64, 128]
    assert takes(kernel, heads=(128, 1)) and not takes(kernel, heads=(256, 1))
    unaligned = torch.zeros(2 * 2 * 16 * 2 * 64 + 1, dtype=HALF)[1:].view(2, 2, 16, 2, 64)
    assert not kernel.takes(torch.zeros(3, 4, 64, dtype=HALF), unaligned, NO_OPTIONS, None)


def test_it_is_found_on_hopper_and_used_where_the_environment_names_it(
    kernel: HopperPrompts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hopper_prompts, "chip_of", lambda _: CHIPS["b200"])
    assert find_hopper_prompts(CUDA) is None and find_hopper_prompts(torch.device("cpu")) is None
    monkeypatch.setattr(hopper_prompts, "chip_of", lambda _: CHIPS["h200"])
    assert isinstance(find_hopper_prompts(CUDA), HopperPrompts)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert wanted_hopper_prompts(CUDA) is None
    monkeypatch.setenv(VARIABLE, "hopper-prompts")
    assert isinstance(wanted_hopper_prompts(CUDA), HopperPrompts)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.nvidia.hopper", None)
    assert wanted_hopper_prompts(CUDA) is None and "Triton has no such Gluon" in caplog.text


def test_what_does_not_compile_is_an_error_that_the_choice_knows(
    kernel: HopperPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.errors import TritonError

    def fail(*_: object) -> None:
        raise TritonError("too many registers")

    monkeypatch.setattr(kernel, "_launch", fail)
    with pytest.raises(RuntimeError, match="TritonError: too many registers"):
        kernel.attend(*[None] * 6)


def test_its_module_imports_no_gluon() -> None:
    code = (
        "import sys, diptych.workers.execution.gpu.prompt_part; sys.exit(any('gluon' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
