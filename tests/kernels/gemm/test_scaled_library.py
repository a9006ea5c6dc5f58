"""Libraries that multiply fp8 in place of our kernel: torch's own product, and DeepGEMM by a fake that is as strict."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diptych.kernels.common.tuning import CHIPS, chip_of
from diptych.kernels.gemm import scaled_library
from diptych.kernels.gemm.linear import linear
from diptych.kernels.gemm.quantise_rows import quantise_rows
from diptych.kernels.gemm.scaled_gemm import ScaledLibrary, ScaledWeight, scaled_gemm, scaled_gemm_twin
from diptych.kernels.gemm.scaled_library import DeepGemm, TorchProduct, find_libraries

from ...support.gpu.fake_deep_gemm import make_deep_gemm
from ...support.quantised import random_scaled

FP8, HALF = torch.float8_e4m3fn, torch.bfloat16
ON = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    if request.node.get_closest_marker("gpu") is not None:  # with what is there
        return monkeypatch
    monkeypatch.setitem(sys.modules, "deep_gemm", make_deep_gemm())
    monkeypatch.setattr(scaled_library, "chip_of", lambda _: CHIPS["h200"])
    return monkeypatch


def weight_of(n: int, k: int, blocks: bool, dtype: torch.dtype = FP8) -> ScaledWeight:
    return ScaledWeight(*random_scaled((n, k), dtype, blocks))


def rows_of(num: int, k: int, blocks: bool, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    x = torch.randn(num, k, generator=torch.Generator().manual_seed(1)).to(HALF)
    return quantise_rows(x, dtype, blocks)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("blocks", [False, True])
def test_products_are_those_of_our_kernel(rows: int, blocks: bool, has_bias: bool) -> None:
    library = DeepGemm() if blocks else TorchProduct()
    weight, given = weight_of(192, 256, blocks), rows_of(rows, 256, blocks)
    bias = torch.randn(192, generator=torch.Generator().manual_seed(2)).to(HALF) if has_bias else None
    assert library.takes(*given, weight, HALF, bias) == (not blocks or not has_bias)
    if blocks and has_bias:
        return
    found = library.multiply(*given, weight, bias)
    assert found.dtype == HALF and found.is_contiguous()
    torch.testing.assert_close(found, scaled_gemm_twin(*given, weight, HALF, bias), rtol=1e-2, atol=1e-2)


def test_torch_is_called_as_it_asks_for_on_a_gpu() -> None:
    """Its own checks of CUDA's tensors, which are those of tensors without numbers."""

    def call(n: int, k: int) -> Tensor:
        weight = ScaledWeight(*(of.to("meta") for of in random_scaled((n, k), FP8, blocks=False)))
        x, scales, bias = rows_of(5, k, False)[0].to("meta"), torch.ones(5, device="meta"), torch.ones(n, dtype=HALF)
        return TorchProduct().multiply(x, scales, weight, bias.to("meta"))

    assert call(48, 32).shape == (5, 48) and call(48, 32).dtype == HALF
    with pytest.raises(RuntimeError, match="divisible by 16"):
        call(48, 40)


def test_what_they_do_not_know_is_ours() -> None:
    of_torch, deep = TorchProduct(), DeepGemm()

    def takes(library: ScaledLibrary, n: int, k: int, blocks: bool, dtype: torch.dtype = FP8) -> bool:
        return library.takes(*rows_of(3, k, blocks, dtype), weight_of(n, k, blocks, dtype), HALF, None)

    assert takes(of_torch, 64, 128, blocks=False) and takes(deep, 64, 128, blocks=True)
    assert not takes(of_torch, 64, 128, blocks=True) and not takes(deep, 64, 128, blocks=False)
    assert not takes(of_torch, 64, 128, False, torch.int8) and not takes(deep, 64, 128, True, torch.int8)
    assert not takes(of_torch, 56, 128, blocks=False) and not takes(of_torch, 64, 120, blocks=False)
    assert not takes(deep, 96, 128, blocks=True) and not takes(deep, 64, 192, blocks=True)
    for library, blocks in ((of_torch, False), (deep, True)):
        weight, (x, scales) = weight_of(64, 128, blocks), rows_of(3, 128, blocks)
        assert not library.takes(x, scales, weight, torch.float32, None)
        assert not library.takes(x[:0], scales[:0], weight, HALF, None)
        assert not library.takes(x, scales, weight, HALF, torch.zeros(64))
        strided = torch.zeros(3, 256, dtype=FP8)[:, :128]
        assert not library.takes(strided, scales, weight, HALF, None)
        experts = ScaledWeight(weight.values[None], weight.scales[None])
        assert not library.takes(x, scales, experts, HALF, None)
    assert not of_torch.takes(rows_of(3, 128, False)[0], torch.ones(1), weight_of(64, 128, False), HALF, None)


def names_on(chip: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(scaled_library, "chip_of", lambda _: CHIPS[chip])
    return [library.name for library in find_libraries(ON)]


def test_they_are_found_where_they_are_installed_and_know_the_gpu(
    on_hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert names_on("h100", on_hopper) == ["torch._scaled_mm", "DeepGEMM"]
    assert names_on("b200", on_hopper) == names_on("l40s", on_hopper) == ["torch._scaled_mm"]
    assert names_on("a100", on_hopper) == names_on("mi300x", on_hopper) == []
    del sys.modules["deep_gemm"].fp8_gemm_nt
    assert names_on("h100", on_hopper) == ["torch._scaled_mm"]
    assert "fp8 is not multiplied by deep_gemm: it does not load (AttributeError" in caplog.text
    on_hopper.delitem(sys.modules, "deep_gemm")
    assert names_on("h100", on_hopper) == ["torch._scaled_mm"]


def test_without_a_gpu_there_are_none(on_hopper: pytest.MonkeyPatch) -> None:
    on_hopper.setattr(scaled_library, "chip_of", chip_of)
    assert find_libraries(ON) == []


class Noting(DeepGemm):
    """Notes of how many rows it was given products."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def multiply(self, x: Tensor, x_scales: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
        self.given.append(len(x))
        return super().multiply(x, x_scales, weight, bias)


def test_a_weight_says_who_multiplies_by_it_for_so_many_rows() -> None:
    library, plain = Noting(), weight_of(128, 256, blocks=True)
    weight = replace(plain, libraries=((16, None), (64, library)))
    for num in (1, 16, 17, 64, 65):
        x = torch.randn(num, 256, generator=torch.Generator().manual_seed(num)).to(HALF)
        torch.testing.assert_close(linear(x, weight), linear(x, plain))
    assert library.given == [17, 64]
    given, bias = rows_of(20, 256, True), torch.ones(128, dtype=HALF)
    torch.testing.assert_close(scaled_gemm(*given, weight, HALF, bias), scaled_gemm(*given, plain, HALF, bias))
    assert library.given == [17, 64]


def test_rows_for_which_deep_gemm_compiles() -> None:
    assert sorted(DeepGemm().compiled_rows(200)) == [16, 32, 63, 64, 127, 128, 192, 256]
    assert sorted(DeepGemm().compiled_rows(16)) == [64]
    assert not TorchProduct().compiled_rows(200)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("rows", [1, 16, 70, 2000])
@pytest.mark.parametrize("blocks", [False, True])
def test_on_a_gpu_products_are_those_of_our_kernel(rows: int, blocks: bool) -> None:
    kind = DeepGemm if blocks else TorchProduct
    library = next((of for of in find_libraries(torch.device("cuda")) if isinstance(of, kind)), None)
    if library is None:
        pytest.skip("it does not multiply here")
    weight, given = weight_of(1536, 2048, blocks), [of.to("cuda") for of in rows_of(rows, 2048, blocks)]
    on_gpu = ScaledWeight(weight.values.to("cuda"), weight.scales.to("cuda"))
    assert library.takes(*given, on_gpu, HALF, None)
    due, found = (of.float() for of in (scaled_gemm(*given, on_gpu, HALF), library.multiply(*given, on_gpu, None)))
    assert (found - due).norm() / due.norm() < 1e-2
