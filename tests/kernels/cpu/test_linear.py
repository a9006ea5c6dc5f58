"""The compiled linear layer against torch; and, bit for bit, a row alone against the same row among others."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.linear import PackedLinear, Then, linear, pack

SIZES = [(1, 1, 1), (2, 31, 15), (3, 32, 64), (13, 33, 65), (25, 130, 1030), (250, 96, 66)]  # rows, n, k


def poisoned(num_rows: int, width: int, dtype: torch.dtype, spare: int = 5) -> Tensor:
    """A view of so many rows, NaN on every side."""
    return torch.full((num_rows + 2, width + spare), torch.nan, dtype=dtype)[1:-1, 1 : width + 1]


def operands(num_rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n * k)
    x, weight = poisoned(num_rows, k, dtype), poisoned(n, k, dtype)
    x.copy_(torch.randn(num_rows, k))
    weight.copy_(torch.randn(n, k) * k**-0.5)
    return x, weight, torch.randn(n).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Sums in float32, one rounding to `dtype`."""
    ulp = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(found.double(), wanted, rtol=ulp + 1e-5, atol=3e-6)


def outside_is_untouched(out: Tensor) -> bool:
    around = out._base
    assert around is not None
    return bool(around.isnan().sum() == around.numel() - out.numel())


@pytest.mark.parametrize(("num_rows", "n", "k"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_product(team: Team, dtype: torch.dtype, num_rows: int, n: int, k: int, has_bias: bool) -> None:
    x, weight, bias = operands(num_rows, n, k, dtype)
    packed = pack(team, [weight], bias if has_bias else None)
    for out_dtype in {dtype, torch.float32}:
        out = poisoned(num_rows, n, out_dtype)
        linear(team, x, packed, out=out)
        assert_near(out, exact(x, weight, bias if has_bias else None), out_dtype)
        assert outside_is_untouched(out)


@pytest.mark.parametrize(("num_rows", "n", "k"), SIZES)
def test_sum(team: Team, dtype: torch.dtype, num_rows: int, n: int, k: int) -> None:
    x, weight, bias = operands(num_rows, n, k, dtype)
    out = poisoned(num_rows, n, dtype)
    before = torch.randn(num_rows, n, dtype=dtype)
    linear(team, x, pack(team, [weight], bias), Then.ADD, out.copy_(before))
    assert_near(out, exact(x, weight, bias) + before.double(), dtype)


@pytest.mark.parametrize(("then", "twin"), [(Then.SILU_MUL, silu), (Then.GELU_MUL, gelu)])
@pytest.mark.parametrize("inner", [1, 15, 16, 17, 64])
def test_gate(team: Team, dtype: torch.dtype, then: Then, twin: Any, inner: int) -> None:
    x, weight, bias = operands(5, 2 * inner, 48, dtype)
    gate, up = exact(x, weight, bias).chunk(2, dim=1)
    twin_of_gate = twin(gate, approximate="tanh") if then == Then.GELU_MUL else twin(gate)
    out = poisoned(5, inner, dtype)
    linear(team, x, pack(team, [weight[:inner], weight[inner:]], bias, gated=True), then, out)
    assert_near(out, twin_of_gate * up, dtype)
    assert outside_is_untouched(out)


def test_fused_weights_are_below_one_another(team: Team, dtype: torch.dtype) -> None:
    x, weight, _ = operands(4, 100, 40, dtype)
    apart = pack(team, [weight[:7], weight[7:50].clone(), weight[50:]])
    assert torch.equal(linear(team, x, apart), linear(team, x, pack(team, [weight])))


@pytest.mark.parametrize("k", [70, 2051])
def test_a_row_depends_on_itself_alone(team: Team, dtype: torch.dtype, k: int) -> None:
    x, weight, bias = operands(260, 65, k, dtype)
    packed = pack(team, [weight], bias)
    together = linear(team, x, packed)
    for first, last in [(0, 1), (3, 5), (100, 113), (7, 24), (30, 77), (1, 250)]:
        assert torch.equal(linear(team, x[first:last], packed), together[first:last])


def test_threads_do_not_matter(team: Team, dtype: torch.dtype) -> None:
    x, weight, bias = operands(30, 200, 100, dtype)
    alone = Team(team.library, 1)
    packed: PackedLinear = pack(alone, [weight], bias)
    assert torch.equal(linear(alone, x, packed), linear(team, x, packed))
    alone.close()
