"""Choice of what multiplies by fp8 weights: what is compared, and which weights keep what was chosen."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.common.tuning import CHIPS
from diptych.kernels.gemm import scaled_library
from diptych.kernels.gemm.scaled_gemm import ScaledWeight
from diptych.kernels.gemm.scaled_library import DeepGemm, TorchProduct
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution.common import product_choice
from diptych.workers.execution.common.product_choice import choose_products
from diptych.workers.execution.common.timed_choice import Contest, Timed, Work
from diptych.workers.models.checkpoint.weights import DecoderWeights, LayerWeights

from ....support.checkpoints import make_checkpoint
from ....support.gpu.fake_deep_gemm import make_deep_gemm
from ....support.gpu.serving import GREEDY, generate, late, load, steps_of
from ....support.quantised import random_scaled
from ...models.quant.test_formats import FORMATS
from ...models.quant.writers import quantised

FP8, HALF = torch.float8_e4m3fn, torch.bfloat16
LIMITS = [16, 64]  # of our kernel's kinds, where no GPU is


@pytest.fixture
def contests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[str]]]:
    """What was compared: of which products, rows, and by which libraries. A library is chosen from 17 rows on."""
    seen: list[tuple[str, int, list[str]]] = []

    def fastest(contest: Contest, own: Work, others: Sequence[tuple[Any, Work]], timed: Timed) -> Any:
        due = timed(own)[1]
        for _, work in others:
            assert (timed(work)[1].float() - due.float()).abs().max() <= contest.tolerance * due.float().abs().max()
        seen.append((contest.what, contest.num_tokens, [library.name for library, _ in others]))
        return others[0][0] if contest.num_tokens > LIMITS[0] else None

    monkeypatch.setitem(sys.modules, "deep_gemm", make_deep_gemm())
    monkeypatch.setattr(scaled_library, "chip_of", lambda _: CHIPS["h200"])
    monkeypatch.setattr(product_choice, "fastest", fastest)
    return seen


def weight_of(n: int, k: int, blocks: bool, dtype: torch.dtype = FP8) -> ScaledWeight:
    return ScaledWeight(*random_scaled((n, k), dtype, blocks))


def choose(layers: list[LayerWeights], lm_head: Any, max_tokens: int = 200) -> DecoderWeights:
    weights = DecoderWeights(torch.zeros(8, 128, dtype=HALF), layers, torch.ones(128), lm_head)
    decoder: Any = SimpleNamespace(weights=weights)
    choose_products(FakeDevice().lane("main"), decoder, max_tokens)
    return weights


def chosen(weight: object) -> list[tuple[int, str | None]]:
    assert isinstance(weight, ScaledWeight)
    return [(most, None if library is None else library.name) for most, library in weight.libraries]


def test_each_shape_is_compared_once_for_each_range_of_rows(contests: list[tuple[str, int, list[str]]]) -> None:
    def layer() -> LayerWeights:
        return LayerWeights(weight_of(192, 128, False), weight_of(128, 128, True), qkv_bias=torch.ones(192).to(HALF))

    weights = choose([layer(), layer()], weight_of(512, 128, False))
    each = [("lm_head", [512, 128], "torch._scaled_mm"), ("qkv", [192, 128], "torch._scaled_mm")]
    each.append(("o", [128, 128], "DeepGEMM"))
    due = [(f"products by fp8 weights {size}", rows, [name]) for _, size, name in each for rows in (*LIMITS, 200)]
    assert contests == due
    for holder in weights.layers:
        assert chosen(holder.qkv) == [(16, None), (64, "torch._scaled_mm"), (200, "torch._scaled_mm")]
        assert chosen(holder.o) == [(16, None), (64, "DeepGEMM"), (200, "DeepGEMM")]
    assert chosen(weights.lm_head)[-1] == (200, "torch._scaled_mm")


def test_what_no_library_takes_is_not_even_timed(contests: list[tuple[str, int, list[str]]]) -> None:
    layer = LayerWeights(weight_of(192, 128, False, torch.int8), weight_of(128, 120, True), down=torch.zeros(2, 2))
    layer.experts_down = ScaledWeight(*random_scaled((2, 128, 128), FP8, blocks=True))
    choose([layer], torch.zeros(8, 128, dtype=HALF))
    assert not contests and isinstance(layer.qkv, ScaledWeight) and not layer.qkv.libraries
    assert chosen(layer.o) == [(16, None), (64, None), (200, None)] and not layer.experts_down.libraries


def test_a_library_compiles_at_load_for_all_rows_for_which_it_was_chosen(
    contests: list[tuple[str, int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    multiply = DeepGemm.multiply

    def noting(self: DeepGemm, x: Tensor, *arguments: Any) -> Tensor:
        given.append(len(x))
        return multiply(self, x, *arguments)

    monkeypatch.setattr(DeepGemm, "multiply", noting)
    choose([LayerWeights(weight_of(192, 128, True), torch.zeros(1))], torch.zeros(1))
    assert len(contests) == 3 and set(given) == {16, 17, 32, 63, 64, 65, 127, 128, 192, 200}


@pytest.mark.parametrize(("refused", "last"), [(17, 64), (65, 200)])
def test_a_library_that_refuses_the_fewest_rows_of_a_range_is_not_chosen_for_it(
    refused: int,
    last: int,
    contests: list[tuple[str, int, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The most of them are what is timed; a graph of few rows would end the worker's loading."""
    multiply = TorchProduct.multiply

    def refusing(self: TorchProduct, x: Tensor, *arguments: Any) -> Tensor:
        if len(x) == refused:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")
        return multiply(self, x, *arguments)

    monkeypatch.setattr(TorchProduct, "multiply", refusing)
    weights = choose([LayerWeights(weight_of(192, 128, False), torch.zeros(1))], torch.zeros(1))
    due = {16: None, 64: "torch._scaled_mm", 200: "torch._scaled_mm"} | {last: None}
    assert dict(chosen(weights.layers[0].qkv)) == due
    assert f"products of {refused} to {last} rows" in caplog.text and "CUBLAS_STATUS_NOT_SUPPORTED" in caplog.text


def test_without_a_library_nothing_is_compared(
    contests: list[tuple[str, int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled_library, "chip_of", lambda _: CHIPS["a100"])
    weights = choose([LayerWeights(weight_of(192, 128, False), torch.zeros(1))], torch.zeros(1))
    assert not contests and not chosen(weights.layers[0].qkv)


def test_a_worker_computes_with_what_was_chosen(
    contests: list[tuple[str, int, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs and prompts, and the tokens stay about the same."""
    source = make_checkpoint(tmp_path / "source", "llama", 8)
    packed, _ = quantised(source, tmp_path, *FORMATS["fp8, rows too"])
    given: list[int] = []
    multiply = TorchProduct.multiply

    def noting(self: TorchProduct, x: Tensor, *arguments: Any) -> Tensor:
        given.append(len(x))
        return multiply(self, x, *arguments)

    monkeypatch.setattr(TorchProduct, "multiply", noting)
    runner = load(packed, late(), max_batch_tokens=40, dtype="bfloat16")
    assert contests and {tuple(names) for _, _, names in contests} == {("torch._scaled_mm",)}
    weights = steps_of(runner)._own.prompts.pieces.decoder.weights
    assert chosen(weights.layers[-1].o) == [(16, None), (40, "torch._scaled_mm")]
    given.clear()
    run = generate(runner, [list(range(1, 38)), [1, 2, 3]], [GREEDY] * 2, max_batch_tokens=40)
    assert all(len(tokens) == GREEDY.max_tokens for tokens in run.token_ids) and given and min(given) > LIMITS[0]
