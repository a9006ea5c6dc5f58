"""Choice of the kernel for experts with many tokens: what is compared, and which layers keep what was chosen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.common.untried import VARIABLE
from diptych.kernels.moe import hopper_experts
from diptych.kernels.moe.grouped_gemm import grouped_product_twin
from diptych.workers.execution.common import expert_choice
from diptych.workers.execution.common.timed_choice import Contest, Timed, Work

from ....support.checkpoints import make_checkpoint
from ....support.gpu.serving import GREEDY, generate, late, load, steps_of


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_worker_chooses_at_load_where_it_is_asked_to(
    is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kind of product once; and what was chosen then computes."""
    launched: list[bool] = []

    def launch(x: Tensor, weight: Tensor, order: Any, gate: int | None, out: Tensor) -> None:
        launched.append(gate is not None)
        out.copy_(grouped_product_twin(x, weight, order, x.dtype, gate=gate))

    def fastest(contest: Contest, own: Work, others: Sequence[tuple[Any, Work]], timed: Timed) -> Any:
        ((gluon, other),) = others
        torch.testing.assert_close(timed(other)[1], timed(own)[1])
        return gluon if contest.what.startswith("first") else None

    if is_asked:
        monkeypatch.setenv(VARIABLE, "hopper-experts")
    monkeypatch.setattr(hopper_experts, "takes", lambda *_: True)
    monkeypatch.setattr(hopper_experts, "launch", launch)
    monkeypatch.setattr(expert_choice, "fastest", fastest)
    caplog.set_level("INFO")
    runner = load(make_checkpoint(tmp_path / "mixture", "qwen3moe", seed=4), late(), max_batch_tokens=40)
    assert len(launched) == (2 * expert_choice.NUM_CALLS if is_asked else 0)
    assert ("products of experts that Gluon computes: 1 of 2" in caplog.text) == is_asked
    layers = steps_of(runner)._own.prompts.pieces.decoder.layers
    mixtures = [layer.experts_in_gluon for layer in layers if layer.weights.router is not None]
    assert mixtures and all(each == (is_asked, False) for each in mixtures)
    generate(runner, [[1, 2, 3, 4]], [GREEDY])
