"""The compiled linear layer compared with torch; a row alone equals, bit for bit, the same row among others."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from diptych.kernels.cpu.formats import AT_LOAD, Format
from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.linear import Epilogue, linear, pack
from diptych.workers.models.rounding import int4, int8
from diptych.workers.models.rounding.stored import scales_of_part

SIZES = [(1, 1, 1), (2, 31, 15), (3, 32, 64), (13, 33, 65), (25, 130, 1030), (250, 96, 66)]  # rows, n, k
FORMATS = AT_LOAD[:3]  # test_rows8.py has W8A8


def poisoned(num_rows: int, width: int, dtype: torch.dtype, spare: int = 5) -> Tensor:
    """A view of this many rows, surrounded by NaN."""
    return torch.full((num_rows + 2, width + spare), torch.nan, dtype=dtype)[1:-1, 1 : width + 1]


def operands(num_rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n * k)
    x, weight = poisoned(num_rows, k, dtype), poisoned(n, k, dtype)
    x.copy_(torch.randn(num_rows, k))
    weight.copy_(torch.randn(n, k) * k**-0.5)
    return x, weight, torch.randn(n).to(dtype)


def as_stored(weight: Tensor, format: Format) -> Tensor:
    """What is left of the weights, float64."""
    match format:
        case Format.PLAIN:
            return weight.double()
        case Format.INT8:
            return int8.dequantise(*int8.quantise(weight)).double()
        case Format.INT4:
            return int4.dequantise(*int4.quantise(weight)).double()


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Sums in float32, one rounding to `dtype`."""
    ulp = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(found.double(), wanted, rtol=ulp + 1e-5, atol=3e-6)


def assert_stored(found: Tensor, wanted: Tensor, format: Format, dtype: torch.dtype) -> None:
    """Exactly, but in bfloat16 groups' sums are multiplied by ratios of their scales, which are rounded to float32."""
    is_exact = format != Format.INT4 or dtype == torch.float32
    torch.testing.assert_close(found, wanted.float(), rtol=0.0 if is_exact else 1e-6, atol=0.0)


def assert_only_written(out: Tensor) -> None:
    around = out._base
    assert around is not None
    assert around.isnan().sum() == around.numel() - out.numel()


@pytest.mark.parametrize("format", FORMATS)
def test_product(team: Team, dtype: torch.dtype, format: Format) -> None:
    for num_rows, n, k in SIZES:
        x, weight, bias = operands(num_rows, n, k, dtype)
        packed = pack(team, [weight], bias, format=format)
        wanted = x.double() @ as_stored(weight, format).T + bias.double()
        for out_dtype in {dtype, torch.float32}:
            out = poisoned(num_rows, n, out_dtype)
            linear(team, x, packed, out=out)
            assert_near(out, wanted, out_dtype)
            assert_only_written(out)


@pytest.mark.parametrize("k", [32, 96, 128, 576])
def test_quantised_weights_are_their_twins(pair: Team, dtype: torch.dtype, k: int) -> None:
    _, weight, _ = operands(1, 40, k, dtype)
    weight[7] = 0
    weight[9, : k // 2] = 0
    weight[11, 0] = 5.0
    weight[12, 0] = -5.0
    for format in (Format.INT8, Format.INT4):
        rows = linear(pair, torch.eye(k, dtype=dtype), pack(pair, [weight], format=format), out=torch.empty(k, 40))
        assert_stored(rows.T, as_stored(weight, format), format, dtype)


@pytest.mark.parametrize("format", [Format.INT8, Format.INT4])
def test_a_part_of_longer_rows_has_their_scales(pair: Team, dtype: torch.dtype, format: Format) -> None:
    _, weight, _ = operands(1, 40, 384, dtype)
    weight[:, :96] /= 16  # by its own scales it would be stored otherwise
    for part in (slice(0, 96), slice(96, 192), slice(192, 384)):
        scales = scales_of_part(weight, format, part)
        packed = pack(pair, [weight[:, part]], format=format, scales=scales)
        rows = linear(pair, torch.eye(packed.of.k, dtype=dtype), packed, out=torch.empty(packed.of.k, 40))
        assert_stored(rows.T, as_stored(weight, format)[:, part], format, dtype)


def test_sum_without_a_bias(pair: Team, dtype: torch.dtype) -> None:
    x, weight, _ = operands(13, 33, 65, dtype)
    before = torch.randn(13, 33, dtype=dtype)
    out = poisoned(13, 33, dtype).copy_(before)
    linear(pair, x, pack(pair, [weight]), Epilogue.ADD, out)
    assert_near(out, x.double() @ weight.double().T + before.double(), dtype)
    assert_only_written(out)


@pytest.mark.parametrize("epilogue", [Epilogue.SILU_MUL, Epilogue.GELU_MUL])
@pytest.mark.parametrize("format", FORMATS)
def test_gate(pair: Team, dtype: torch.dtype, epilogue: Epilogue, format: Format) -> None:
    for inner in (1, 15, 16, 17, 64):
        x, weight, bias = operands(5, 2 * inner, 48, dtype)
        packed = pack(pair, [weight[:inner], weight[inner:]], bias, gated=True, format=format)
        gate, up = (x.double() @ as_stored(weight, format).T + bias.double()).chunk(2, dim=1)
        out = poisoned(5, inner, dtype)
        linear(pair, x, packed, epilogue, out)
        assert_near(out, (silu(gate) if epilogue == Epilogue.SILU_MUL else gelu(gate, approximate="tanh")) * up, dtype)
        assert_only_written(out)


@pytest.mark.parametrize("epilogue", [Epilogue.SILU_MUL, Epilogue.GELU_MUL])
def test_large_gates(team: Team, dtype: torch.dtype, epilogue: Epilogue) -> None:
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4, torch.nan]], dtype=dtype)
    expected = gate.clone()
    expected[0, :4] = 0.0
    one = torch.ones(1, 1, dtype=dtype)
    packed = pack(team, [gate.view(8, 1), torch.ones(8, 1, dtype=dtype)], gated=True)
    torch.testing.assert_close(linear(team, one, packed, epilogue), expected, rtol=0.0, atol=1e-30, equal_nan=True)


def test_parts_are_below_one_another(pair: Team, dtype: torch.dtype) -> None:
    x, weight, _ = operands(4, 100, 40, dtype)
    apart = pack(pair, [weight[:7], weight[7:50].clone(), weight[50:]])
    assert torch.equal(linear(pair, x, apart), linear(pair, x, pack(pair, [weight])))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_depends_on_itself_alone(pair: Team, dtype: torch.dtype, format: Format) -> None:
    for k in (70, 2051):
        x, weight, bias = operands(260, 65, k, dtype)
        packed = pack(pair, [weight], bias, format=format)
        together = linear(pair, x, packed)
        for first, last in [(0, 1), (3, 5), (100, 113), (7, 24), (30, 77), (1, 250)]:
            assert torch.equal(linear(pair, x[first:last], packed), together[first:last])


@pytest.mark.parametrize("format", FORMATS)
def test_threads_do_not_matter(team: Team, dtype: torch.dtype, format: Format) -> None:
    x, weight, bias = operands(30, 200, 100, dtype)
    alone = Team(team.library, 1)
    packed, same = (pack(by, [weight], bias, format=format) for by in (alone, team))
    assert torch.equal(packed.weight, same.weight)
    assert torch.equal(linear(alone, x, packed), linear(team, x, packed))
    alone.close()
