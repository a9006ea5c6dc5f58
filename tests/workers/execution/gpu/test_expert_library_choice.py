"""Choice of what computes experts of many tokens: what is compared, which layers keep it, and in which order.

FlashInfer is taken for weights of bfloat16, DeepGEMM for those in fp8 with scales of blocks."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.common.tuning import CHIPS
from diptych.kernels.gemm.linear import Weight
from diptych.kernels.gemm.scaled_gemm import ScaledWeight
from diptych.kernels.moe import expert_library, scaled_expert_library
from diptych.kernels.moe.expert_library import FlashInferExperts
from diptych.kernels.moe.scaled_expert_library import DeepGemmExperts
from diptych.workers.execution.common import expert_library_choice
from diptych.workers.execution.common.timed_choice import Contest, Timed, Work
from diptych.workers.models.checkpoint.weights import LayerWeights
from diptych.workers.models.layers import moe as moe_layer
from diptych.workers.models.layers.decoder import Decoder
from diptych.workers.models.layers.moe import moe

from ....support.checkpoints import make_checkpoint
from ....support.gpu.fake_deep_gemm import make_deep_gemm
from ....support.gpu.fake_flashinfer import make_flashinfer
from ....support.gpu.serving import GREEDY, generate, late, load, steps_of
from ...models.quant.writers import fp8_blocks, quantised

HALF = torch.bfloat16
Contests = list[tuple[str, int]]


@pytest.fixture
def contests(monkeypatch: pytest.MonkeyPatch) -> Contests:
    """What was compared, of how many tokens. The library is chosen for up to 24."""
    seen: Contests = []

    def fastest(contest: Contest, own: Work, others: Sequence[tuple[Any, Work]], timed: Timed) -> Any:
        ((library, work),) = others
        due = timed(own)[1].float()
        error = (timed(work)[1].float() - due).abs().max()
        assert contest.tolerance == (0.05 if "fp8" in contest.what else 0.02)
        assert error <= contest.tolerance * due.abs().max() > 0
        seen.append((contest.what, contest.num_tokens))
        return library if contest.num_tokens <= 24 else None

    for name, module in make_flashinfer().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(expert_library, "chip_of", lambda _: CHIPS["h200"])
    monkeypatch.setattr(expert_library_choice, "RANGES", (8, 16, 24))
    monkeypatch.setattr(expert_library_choice, "fastest", fastest)
    return seen


def loaded(tmp_path: Path, **changes: Any) -> tuple[Any, Decoder]:
    path = tmp_path / "mixture"
    if not path.exists():
        make_checkpoint(path, "qwen3moe", seed=4)
    runner = load(path, late(), **{"max_batch_tokens": 40, "dtype": "bfloat16"} | changes)
    return runner, steps_of(runner)._own.prompts.pieces.decoder


def mixtures(decoder: Decoder) -> list[tuple[Any, LayerWeights]]:
    return [(of.spec.feed_forward, of.weights) for of in decoder.layers if of.weights.router is not None]


def limits(weights: LayerWeights) -> list[tuple[int, str | None]]:
    return [(last, of.name if of is not None else None) for last, of in weights.experts_libraries or ()]


def plain(weights: LayerWeights) -> LayerWeights:
    """Those of a layer as its checkpoint has them."""
    up_gate = weights.experts_gate_up
    assert isinstance(up_gate, Tensor)
    gate_up = up_gate.roll(up_gate.shape[1] // 2, 1)
    return replace(weights, experts_gate_up=gate_up, experts_libraries=None)


class Noting(FlashInferExperts):
    """Notes of how many tokens it was given experts."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def compute(self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        self.given.append(len(x))
        return super().compute(x, weights, experts, gate_up, down)


def test_a_worker_chooses_at_load(tmp_path: Path, contests: Contests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of mixture once; and what was chosen then computes, of so many tokens alone."""
    library = Noting()
    monkeypatch.setattr(expert_library_choice, "find_expert_library", lambda _: library)
    runner, decoder = loaded(tmp_path, cuda_graphs=False)
    assert {9, 16, 17, 24} <= set(library.given)  # the first of each range, for what it compiles
    monkeypatch.setattr(moe_layer, "has_kernel", lambda _: True)
    assert [num for _, num in contests] == [16, 24, 40]
    assert contests[0][0] == f"experts {list(mixtures(decoder)[0][1].experts_gate_up.shape)}"  # type: ignore[union-attr]
    assert len(mixtures(decoder)) == 3
    for spec, weights in mixtures(decoder):
        assert limits(weights) == [(8, None), (16, library.name), (24, library.name), (40, None)]
        library.given.clear()
        for num in (1, 8, 9, 24, 25, 41):
            hidden = torch.randn(num, decoder.spec.hidden_size, generator=torch.Generator().manual_seed(num)).to(HALF)
            due = moe(spec, plain(weights), hidden)
            torch.testing.assert_close(moe(spec, weights, hidden), due, rtol=2e-2, atol=2e-3)
        assert library.given == [9, 24]
    library.given.clear()
    generate(runner, [list(range(1, 20)), [1, 2, 3]], [GREEDY, GREEDY])
    assert library.given and all(8 < num <= 24 for num in library.given)


def test_a_library_that_fails_for_the_fewest_tokens_of_a_range_is_not_chosen_for_it(
    tmp_path: Path, contests: Contests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Noting):
        def compute(self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
            if len(x) == 17:
                raise RuntimeError("CUDA error: invalid configuration argument")
            return super().compute(x, weights, experts, gate_up, down)

    library = Refusing()
    monkeypatch.setattr(expert_library_choice, "find_expert_library", lambda _: library)
    _, decoder = loaded(tmp_path, cuda_graphs=False)
    for _, weights in mixtures(decoder):
        assert limits(weights) == [(8, None), (16, library.name), (24, None), (40, None)]
    assert "experts of 17 tokens and more are not computed by FlashInfer: it fails at some sizes (R" in caplog.text


def test_without_kernels_experts_are_read_in_either_order(tmp_path: Path, contests: Contests) -> None:
    _, decoder = loaded(tmp_path)
    spec, weights = mixtures(decoder)[0]
    hidden = torch.randn(5, decoder.spec.hidden_size, generator=torch.Generator().manual_seed(1)).to(HALF)
    assert torch.equal(moe(spec, weights, hidden), moe(spec, plain(weights), hidden))


def test_weights_stay_as_they_are_where_it_is_not_faster(
    tmp_path: Path, contests: Contests, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = mixtures(loaded(tmp_path)[1])
    monkeypatch.setattr(expert_library_choice, "fastest", lambda *_: None)
    for (_, due), (_, found) in zip(chosen, mixtures(loaded(tmp_path)[1]), strict=True):
        assert found.experts_libraries is None
        assert torch.equal(found.experts_gate_up, plain(due).experts_gate_up)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"max_batch_tokens": 8}, {"dtype": "float32"}])
def test_what_it_does_not_know_is_ours(changes: dict[str, Any], tmp_path: Path, contests: Contests) -> None:
    _, decoder = loaded(tmp_path, **changes)
    assert contests == [] and all(of.experts_libraries is None for _, of in mixtures(decoder))


def test_mixtures_that_are_not_compared(tmp_path: Path, contests: Contests) -> None:
    _, decoder = loaded(tmp_path, max_batch_tokens=8)
    layer = next(of for of in decoder.layers if of.weights.router is not None)
    kind, spec = expert_library_choice._kind, layer.spec.feed_forward
    assert kind(layer, HALF) is not None and kind(layer, torch.float32) is None
    weights, over = layer.weights, SimpleNamespace(is_over=True)
    bias = torch.zeros(weights.experts_down.shape[:2])  # type: ignore[union-attr]
    gelu = replace(spec, expert=replace(spec.expert, activation="gelu"))  # type: ignore[union-attr, type-var]
    for changed in (
        replace(layer, experts=over),  # type: ignore[arg-type]
        replace(layer, weights=replace(weights, experts_down_bias=bias)),
        replace(layer, weights=replace(weights, experts_gate_up=None)),
        replace(layer, spec=replace(layer.spec, feed_forward=gelu)),
        next(of for of in decoder.layers if of.weights.router is None),
    ):
        assert kind(changed, HALF) is None


class NotingScaled(DeepGemmExperts):
    """Notes of how many tokens it was given experts."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def compute(self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        self.given.append(len(x))
        return super().compute(x, weights, experts, gate_up, down)


@pytest.fixture
def scaled(contests: Contests, monkeypatch: pytest.MonkeyPatch) -> NotingScaled:
    monkeypatch.setitem(sys.modules, "deep_gemm", make_deep_gemm())
    monkeypatch.setattr(scaled_expert_library, "chip_of", lambda _: CHIPS["h200"])
    library = NotingScaled()
    monkeypatch.setattr(expert_library_choice, "find_scaled_expert_library", lambda _: library)
    return library


def loaded_scaled(tmp_path: Path, block: int = 128) -> tuple[Any, Decoder]:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}  # one block is a scale a row
    source = make_checkpoint(tmp_path / "source", "qwen3moe", seed=4, **sizes)
    packed, _ = quantised(source, tmp_path, *fp8_blocks(block, block))
    runner = load(packed, late(), max_batch_tokens=40, dtype="bfloat16", cuda_graphs=False)
    return runner, steps_of(runner)._own.prompts.pieces.decoder


def test_a_worker_chooses_for_weights_in_fp8(
    tmp_path: Path, contests: Contests, scaled: NotingScaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate stays before up; what was chosen computes, of so many tokens alone."""
    runner, decoder = loaded_scaled(tmp_path)
    assert {9, 16, 17, 24} <= set(scaled.given)
    assert [num for _, num in contests] == [16, 24, 40] and contests[0][0].startswith("experts in fp8 [")
    monkeypatch.setattr(moe_layer, "has_kernel", lambda _: True)
    assert len(mixtures(decoder)) == 3
    for spec, weights in mixtures(decoder):
        assert isinstance(weights.experts_gate_up, ScaledWeight) and not weights.experts_up_first
        assert limits(weights) == [(8, None), (16, "DeepGEMM"), (24, "DeepGEMM"), (40, None)]
        scaled.given.clear()
        for num in (1, 8, 9, 24, 25, 41):
            hidden = torch.randn(num, decoder.spec.hidden_size, generator=torch.Generator().manual_seed(num)).to(HALF)
            due = moe(spec, replace(weights, experts_libraries=None), hidden).float()
            assert (moe(spec, weights, hidden).float() - due).norm() <= 3e-2 * due.norm()
        assert scaled.given == [9, 24]
    scaled.given.clear()
    generate(runner, [list(range(1, 20)), [1, 2, 3]], [GREEDY, GREEDY])
    assert scaled.given and all(8 < num <= 24 for num in scaled.given)


def test_weights_in_fp8_with_scales_of_other_blocks_are_ours(
    tmp_path: Path, contests: Contests, scaled: NotingScaled
) -> None:
    _, decoder = loaded_scaled(tmp_path, block=32)
    assert contests == [] and all(of.experts_libraries is None for _, of in mixtures(decoder))


def test_each_library_is_asked_for_its_own_weights(tmp_path: Path, contests: Contests, scaled: NotingScaled) -> None:
    assert {name for _, of in mixtures(loaded(tmp_path)[1]) for _, name in limits(of)} == {None, "FlashInfer"}
    assert not scaled.given
