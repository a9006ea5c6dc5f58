"""Products of int8 weights and quantised rows: exactly the sums of whole numbers, in every company."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from diptych.kernels.cpu.formats import Format, NumberLayout
from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.linear import Epilogue, WeightNumbers, linear, pack, pack_numbers
from diptych.workers.models.rounding import int8
from diptych.workers.models.rounding.w8a8 import quantise_rows

from .test_linear import assert_near, assert_only_written, poisoned

SIZES = [(1, 1, 1), (2, 31, 15), (3, 32, 64), (13, 33, 65), (25, 130, 1030), (250, 96, 66), (70, 40, 5000)]


def numbers(n: int, k: int) -> WeightNumbers:
    """With the largest that int8 has."""
    stored = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    stored[0] = -128
    return WeightNumbers(stored, torch.rand(n, 1) * k**-0.5 / 64)


def wanted(x: Tensor, of: WeightNumbers) -> Tensor:
    """Return the product, float64, whose sums are exact."""
    q, scales = quantise_rows(x)
    return (q.double() @ of.numbers.double().T) * scales.double() * of.scales.double().T


def test_product(team: Team, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for num_rows, n, k in SIZES:
        of, bias = numbers(n, k), torch.randn(n).to(dtype)
        x = poisoned(num_rows, k, dtype).copy_(torch.randn(num_rows, k))
        x[0] = 0.5
        packed = pack_numbers(team, [of], NumberLayout(Format.W8A8, k), dtype, bias)
        for out_dtype in {dtype, torch.float32}:
            out = poisoned(num_rows, n, out_dtype)
            linear(team, x, packed, out=out)
            assert_near(out, wanted(x, of) + bias.double(), out_dtype)
            assert_only_written(out)


def test_gate_and_sum(pair: Team, dtype: torch.dtype) -> None:
    of, x = numbers(2 * 17, 96), torch.randn(5, 96).to(dtype)
    layout = NumberLayout(Format.W8A8, 96)
    gate, up = wanted(x, of).chunk(2, dim=1)
    packed = pack_numbers(pair, [of], layout, dtype, gated=True)
    assert_near(linear(pair, x, packed, Epilogue.SILU_MUL, poisoned(5, 17, dtype)), silu(gate) * up, dtype)
    before = torch.randn(5, 34).to(dtype)
    found = linear(pair, x, pack_numbers(pair, [of], layout, dtype), Epilogue.ADD, poisoned(5, 34, dtype).copy_(before))
    assert_near(found, wanted(x, of) + before.double(), dtype)


def test_rows_that_are_nothing_or_not_finite(pair: Team, dtype: torch.dtype) -> None:
    x = torch.randn(4, 70).to(dtype)
    x[0], x[1, 69], x[2, 3] = 0.0, torch.nan, torch.inf
    packed = pack_numbers(pair, [numbers(40, 70)], NumberLayout(Format.W8A8, 70), dtype)
    found = linear(pair, x, packed)
    assert (found[0] == 0).all() and found[1:3].isnan().all() and found[3].isfinite().all()


def test_a_row_depends_on_itself_alone(team: Team, dtype: torch.dtype) -> None:
    for k in (70, 2051):
        x, bias = torch.randn(260, k).to(dtype), torch.randn(65)
        packed = pack_numbers(team, [numbers(65, k)], NumberLayout(Format.W8A8, k), dtype, bias)
        together = linear(team, x, packed)
        for first, last in [(0, 1), (3, 5), (100, 113), (7, 24), (30, 77), (1, 250)]:
            assert torch.equal(linear(team, x[first:last], packed), together[first:last])


def test_weights_quantised_at_load_are_int8s(pair: Team, dtype: torch.dtype) -> None:
    weight, x = torch.randn(40, 66).to(dtype), torch.randn(9, 66).to(dtype)
    packed = pack(pair, [weight], format=Format.W8A8)
    assert torch.equal(packed.weight, pack(pair, [weight], format=Format.INT8).weight)
    assert_near(linear(pair, x, packed), wanted(x, WeightNumbers(*int8.quantise(weight))), dtype)


def test_quantised_rows_are_half_a_step_from_what_they_were() -> None:
    x = torch.randn(7, 300)
    q, scales = quantise_rows(x)
    assert (q.abs().amax(dim=1) == 127).all()
    assert ((q * scales - x).abs() <= scales * 0.50001).all()
    assert pytest.approx(float(scales[0]) * 127) == float(x[0].abs().max())
