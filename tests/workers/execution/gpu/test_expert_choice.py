"""Choice of the kernel for experts with many tokens: the faster one, of those that give the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.common.untried import VARIABLE
from diptych.kernels.moe import hopper_experts
from diptych.kernels.moe.grouped_gemm import grouped_product_twin
from diptych.workers.execution.common import expert_choice
from diptych.workers.execution.common.expert_choice import Multiply, is_faster

from ....support.checkpoints import make_checkpoint
from ....support.gpu.serving import GREEDY, generate, late, load

ONES = torch.ones(3, 2)


def timed(own_s: float, other_s: float, other: Multiply) -> bool:
    times = [9.0, own_s, own_s, own_s, 9.0, other_s, other_s, other_s]

    def seconds(multiply: Multiply, results: list[Tensor]) -> float:
        results[:] = [multiply()]
        return times.pop(0)

    return is_faster("a product", lambda: ONES, other, seconds)


def test_the_faster_one_multiplies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert timed(8e-3, 4e-3, lambda: ONES + 1e-3)
    assert "a product: in Gluon 1000 us, by the plain kernel 2000 us" in caplog.text
    assert not timed(4e-3, 8e-3, lambda: ONES)


@pytest.mark.parametrize("wrong", [0.1, float("nan")])
def test_one_that_gives_something_else_does_not(wrong: float, caplog: pytest.LogCaptureFixture) -> None:
    assert not timed(8e-3, 4e-3, lambda: ONES + wrong)
    assert "a product: not in Gluon, whose results differ by" in caplog.text


def test_one_that_fails_does_not(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Tensor:
        raise ModuleNotFoundError("No module named 'triton.experimental'")

    assert not timed(8e-3, 4e-3, fail)
    assert "not in Gluon, which fails (ModuleNotFoundError: No module named 'triton.experimental')" in caplog.text


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_worker_chooses_at_load_where_it_is_asked_to(
    is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of product once; and what was chosen then computes."""
    launched: list[bool] = []

    def launch(x: Tensor, weight: Tensor, order: Any, gate: int | None, out: Tensor) -> None:
        launched.append(gate is not None)
        out.copy_(grouped_product_twin(x, weight, order, x.dtype, gate=gate))

    def in_less_time(name: str, own: Multiply, other: Multiply, seconds: Callable[..., float]) -> bool:
        results: tuple[list[Tensor], list[Tensor]] = ([], [])
        assert all(seconds(of, into) >= 0 for of, into in zip((own, other), results, strict=True))
        torch.testing.assert_close(results[1][0], results[0][0])
        return name.startswith("first")

    if is_asked:
        monkeypatch.setenv(VARIABLE, "hopper-experts")
    monkeypatch.setattr(hopper_experts, "chosen", set())
    monkeypatch.setattr(hopper_experts, "takes", lambda *_: True)
    monkeypatch.setattr(hopper_experts, "launch", launch)
    monkeypatch.setattr(expert_choice, "is_faster", in_less_time)
    runner = load(make_checkpoint(tmp_path / "mixture", "qwen3moe", seed=4), late(), max_batch_tokens=40)
    assert len(launched) == (2 * expert_choice.NUM_IN_A_RUN if is_asked else 0)
    assert [product.is_gated for product in hopper_experts.chosen] == [True] * is_asked
    generate(runner, [[1, 2, 3, 4]], [GREEDY])
