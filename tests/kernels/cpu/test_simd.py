"""simd.h for every instruction set: its exponential, bfloat16 rounding and dot products, to the last place."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.kernels.cpu.build import FLAGS, ISAS, SOURCES, CannotBuild, find_compiler
from diptych.kernels.cpu.load import library

found = library()


@pytest.fixture(scope="module", params=[isa for isa in found.isas if isa in ISAS] if found else [])
def simd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        compiler = find_compiler()
    except CannotBuild as e:
        pytest.skip(str(e))
    path = tmp_path_factory.mktemp("simd") / f"{request.param}.so"
    source = Path(__file__).parent / "simd_probe.cpp"
    flags = (*FLAGS, *ISAS[request.param], f"-DDIPTYCH_ISA={request.param}", f"-I{SOURCES}", "-fvisibility=default")
    subprocess.run([compiler, *flags, "-shared", str(source), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def call(function: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """function(inputs..., out, number of outputs)."""
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (*inputs, out)]
    function(*addresses, ctypes.c_int64(out.numel()))
    return out


def test_exp_is_within_two_units_in_the_last_place(simd: ctypes.CDLL) -> None:
    x = torch.linspace(-87.0, 88.0, 1 << 16)
    y = call(simd.exps, torch.empty_like(x), x)
    exact = x.double().exp()
    unit = torch.frexp(exact).exponent.double().sub(24).exp2()
    assert ((y.double() - exact).abs() / unit).max() <= 2.0


def test_exp_at_its_ends(simd: ctypes.CDLL) -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([0.0, -0.0, -87.1, -200.0, -inf, 88.0, 200.0, inf, nan, *[1.0] * 7])
    y = call(simd.exps, torch.empty_like(x), x)
    assert y[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert y[6] == y[7] == y[5] > 1.6e38 and y[8].isnan()


def test_bfloat16_is_rounded_to_the_nearest_even(simd: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), dtype=torch.int64).to(torch.int32)
    # The halves between two bfloat16, their neighbours, and both infinities, NaNs, zeros and the largest.
    halves = (bits[:4096] & -65536) | 0x8000
    special = torch.tensor([0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, 0, 1, 0x8000, 0x18000], dtype=torch.int32)
    all_bits = torch.cat([bits, halves, halves - 1, halves + 1, special, special | -(1 << 31)])
    # The processor's own instruction takes subnormal floats for zero.
    is_subnormal = ((all_bits & 0x7F800000) == 0) & ((all_bits & 0x7FFFFF) != 0)
    x = all_bits.view(torch.float32)
    expected = x.bfloat16()
    for function in (simd.to_bf16s, simd.narrows):
        y = call(function, torch.empty_like(x, dtype=torch.bfloat16), x)
        same = (y.view(torch.int16) == expected.view(torch.int16)) | (y.isnan() & expected.isnan())
        assert same[~is_subnormal].all()
        assert (same | (y == 0.0)).all()


def test_every_bfloat16_is_widened_exactly(simd: ctypes.CDLL) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    y = call(simd.from_bf16s, torch.empty(1 << 16), x)
    assert torch.equal(y.view(torch.int32), x.float().view(torch.int32))


def test_dot2(simd: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(1024, 2).bfloat16(), torch.randn(1024, 2).bfloat16()
    y = call(simd.dot2s, torch.empty(1024), a, b)
    torch.testing.assert_close(y, (0.5 + (a.double() * b.double()).sum(dim=1)).float(), rtol=1e-6, atol=1e-6)


def test_lanes(simd: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    x, out, held = torch.randn(16), torch.empty(2), torch.empty(16)
    simd.lanes.restype = ctypes.c_int64
    num = simd.lanes(*(ctypes.c_void_p(t.data_ptr()) for t in (x, out, held)))
    lanes = x.clone()
    for width in (8, 4, 2, 1):
        lanes = lanes[:width] + lanes[width : 2 * width]
    assert out.tolist() == [lanes[0].item(), x.max().item()]
    assert held[:num].tolist() == x[x > 0].tolist()


@pytest.mark.parametrize("count", [0, 1, 15, 16, 20])
def test_some_lanes(simd: ctypes.CDLL, count: int) -> None:
    x = torch.arange(1.0, 33.0).bfloat16()
    out = torch.zeros(32, dtype=torch.bfloat16)
    simd.some(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(count))
    assert out[: min(count, 16)].tolist() == x[: min(count, 16)].tolist() and not out[min(count, 16) :].any()
