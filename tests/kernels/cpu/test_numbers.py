"""Numbers of checkpoints, packed as they are, multiplied by the compiled kernels: compared with what they mean."""

from dataclasses import replace

import pytest
import torch

from diptych.kernels.cpu.formats import Format, NumberLayout, layout_of_parts
from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.linear import Epilogue, WeightNumbers, linear, pack_numbers
from diptych.workers.models.rounding.numbers import meant, regrouped

from .test_linear import assert_near, assert_only_written, poisoned

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
ALL = 0  # inputs share a scale
LAYOUTS = [
    (Format.INT8, ALL, False),
    (Format.INT8, ALL, True),
    (Format.INT8, 16, False),
    (Format.INT4, ALL, False),
    (Format.INT4, 8, False),
    (Format.INT4, 32, True),
    (Format.INT4, 128, True),
    (Format.TABLE4, 32, False),
    (Format.TABLE4, ALL, True),
    (Format.FP8, ALL, False),
    (Format.FP8, 128, False),
]
SIZES = [(1, 1, 1), (3, 32, 64), (13, 33, 65), (25, 130, 1030), (60, 96, 66)]  # rows, n, k


def layout_for(kind: tuple[Format, int, bool], k: int) -> NumberLayout:
    format, group, has_offsets = kind
    found = layout_of_parts([NumberLayout(format, group or k, has_offsets)], k, range(k))
    if found is None:  # groups of few inputs that k ends within
        found = NumberLayout(format, group, has_offsets)
    return found


def numbers(n: int, k: int, layout: NumberLayout, seed: int = 0) -> WeightNumbers:
    generator = torch.Generator().manual_seed(seed + n * k)
    low, high = (-8, 8) if layout.format.inputs == 8 else (-128, 128)
    stored = torch.randint(low, high, (n, k), generator=generator).to(torch.int8)
    if layout.format == Format.FP8:
        stored[(stored & 127) == 127] = 0  # NaN
    groups = -(-k // layout.group)
    largest = {Format.TABLE4: 6.0, Format.FP8: 448.0}.get(layout.format, -float(low))
    scales = (torch.rand(n, groups, generator=generator) - 0.5) * (4 * k**-0.5 / largest)
    offsets = torch.randn(n, groups, generator=generator) * k**-0.5 if layout.has_offsets else None
    return WeightNumbers(stored, scales, offsets, FP4 if layout.format == Format.TABLE4 else None)


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: f"{kind[0].name}-{kind[1]}-{kind[2]}")
def test_product(pair: Team, dtype: torch.dtype, kind: tuple[Format, int, bool]) -> None:
    for num_rows, n, k in SIZES:
        layout = layout_for(kind, k)
        of, bias = numbers(n, k, layout), torch.randn(n).to(dtype)
        x = poisoned(num_rows, k, dtype).copy_(torch.randn(num_rows, k))
        wanted = x.double() @ meant(of, layout).double().T + bias.double()
        packed = pack_numbers(pair, [of], layout, dtype, bias)
        for out_dtype in {dtype, torch.float32}:
            out = poisoned(num_rows, n, out_dtype)
            linear(pair, x, packed, out=out)
            assert_near(out, wanted, out_dtype)
            assert_only_written(out)


@pytest.mark.parametrize("kind", [(Format.INT4, 32, True), (Format.INT8, 16, False), (Format.INT4, 8, False)])
def test_inputs_have_places_of_their_own(pair: Team, dtype: torch.dtype, kind: tuple[Format, int, bool]) -> None:
    """A product of so many rows that they are put in order several times; and each row depends on itself alone."""
    for num_rows, n, k in (*SIZES[1:], (300, 40, 1096)):
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
        layout = replace(layout_for(kind, k), has_order=True)
        of = replace(numbers(n, k, layout), order=order)
        x = poisoned(num_rows, k, dtype).copy_(torch.randn(num_rows, k))
        wanted = x.double()[:, order] @ meant(of, layout).double().T
        packed = pack_numbers(pair, [of], layout, dtype)
        out = poisoned(num_rows, n, dtype)
        linear(pair, x, packed, out=out)
        assert_near(out, wanted, dtype)
        assert_only_written(out)
        assert torch.equal(linear(pair, x[1:3], packed), out[1:3])


@pytest.mark.parametrize("group", [8, 32, 128])
@pytest.mark.parametrize("format", [Format.INT4, Format.TABLE4, Format.FP8])
def test_scales_that_are_far_apart(pair: Team, dtype: torch.dtype, format: Format, group: int) -> None:
    """Groups of zeros may have any scale, and 0; where others are far apart, or 0, each group is summed alone."""
    layout, k = NumberLayout(format, group), 1096
    plain = numbers(40, k, layout)
    changes: dict[str, tuple[float, bool]] = {
        "zeros by 0": (0.0, True),
        "zeros by the least": (2.0**-127, True),
        "numbers by 0": (0.0, False),
        "small numbers": (1e-33, False),
        "large numbers": (1e25, False),
    }
    x = torch.randn(30, k).to(dtype)
    for name, (scale, are_zeros) in changes.items():
        stored, scales = plain.numbers.clone(), plain.scales.clone()
        for row, of_row in ((3, slice(1, 2)), (39, slice(3, None, 2)), (8, slice(None))):
            scales[row, of_row] = scale
            if are_zeros:
                stored.unflatten(1, (-1, 8))[row] *= 0
        of = replace(plain, numbers=stored, scales=scales)
        packed = pack_numbers(pair, [of], layout, dtype)
        assert packed.of.at_once == (512 if are_zeros else group), name
        weight = meant(of, layout).double()
        found = linear(pair, x, packed, out=torch.empty(30, 40))
        assert bool(((found - x.double() @ weight.T).abs() <= 1e-5 * (x.double().abs() @ weight.abs().T)).all()), name
        assert torch.equal(linear(pair, x[3:5], packed, out=torch.empty(2, 40)), found[3:5])


@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize("format", [Format.INT4, Format.TABLE4, Format.FP8])
def test_scales_that_are_powers_of_two(pair: Team, dtype: torch.dtype, format: Format, group: int) -> None:
    """They are in what is unpacked for many rows, whose bits are those of few."""
    layout, k = NumberLayout(format, group), 1096
    of = numbers(65, k, layout)
    of = replace(of, scales=torch.exp2(torch.randint(-21, 4, of.scales.shape).float()))
    packed, x = pack_numbers(pair, [of], layout, dtype), torch.randn(260, k).to(dtype)
    assert packed.of.are_powers
    weight, found = meant(of, layout).double(), linear(pair, x, packed, out=torch.empty(260, 65))
    assert bool(((found - x.double() @ weight.T).abs() <= 1e-5 * (x.double().abs() @ weight.abs().T)).all())
    for first, last in [(0, 1), (3, 5), (7, 24), (30, 77)]:
        assert torch.equal(linear(pair, x[first:last], packed, out=torch.empty(last - first, 65)), found[first:last])
    with_others = replace(of, scales=of.scales * 1.5)
    assert not pack_numbers(pair, [with_others], layout, dtype).of.are_powers


@pytest.mark.parametrize("format", [Format.INT8, Format.INT4, Format.TABLE4, Format.FP8])
def test_every_number_is_what_it_means(team: Team, dtype: torch.dtype, format: Format) -> None:
    """And is multiplied as that, in registers and unpacked before."""
    num = 16 if format.inputs == 8 else 256
    stored = torch.arange(num, dtype=torch.uint8).view(torch.int8).repeat(3, 1)
    if format == Format.INT4:
        stored = ((stored + 8) & 15) - 8
    if format == Format.FP8:
        stored[(stored & 127) == 127] = 0
    layout = NumberLayout(format, 256)
    of = WeightNumbers(stored, torch.ones(3, 1), None, FP4.flip(0) if format == Format.TABLE4 else None)
    packed = pack_numbers(team, [of], layout, dtype)
    whole = linear(team, torch.eye(num, dtype=dtype), packed, out=torch.empty(num, 3))
    assert torch.equal(whole.T, meant(of, layout))
    for i in range(0, num, 5):
        assert torch.equal(linear(team, torch.eye(num, dtype=dtype)[i : i + 1], packed)[0].float(), whole[i])


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: f"{kind[0].name}-{kind[1]}-{kind[2]}")
def test_a_row_depends_on_itself_alone(pair: Team, dtype: torch.dtype, kind: tuple[Format, int, bool]) -> None:
    k = 1096
    layout = layout_for(kind, k)
    packed = pack_numbers(pair, [numbers(65, k, layout)], layout, dtype, torch.randn(65))
    x = torch.randn(260, k).to(dtype)
    together = linear(pair, x, packed)
    for first, last in [(0, 1), (3, 5), (7, 24), (30, 77)]:
        assert torch.equal(linear(pair, x[first:last], packed), together[first:last])


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: f"{kind[0].name}-{kind[1]}-{kind[2]}")
def test_gate_of_two_parts(pair: Team, dtype: torch.dtype, kind: tuple[Format, int, bool]) -> None:
    for inner in (1, 17, 64):
        layout = layout_for(kind, 96)
        gate, up = (numbers(inner, 96, layout, seed) for seed in (1, 2))
        packed = pack_numbers(pair, [gate, up], layout, dtype, gated=True)
        x = torch.randn(5, 96).to(dtype)
        of_gate, of_up = (x.double() @ meant(of, layout).double().T for of in (gate, up))
        found = linear(pair, x, packed, Epilogue.SILU_MUL, poisoned(5, inner, dtype))
        assert_near(found, torch.nn.functional.silu(of_gate) * of_up, dtype)


def test_parts_of_a_weight_have_a_layout_in_common() -> None:
    def of(*parts: NumberLayout | None, k: int = 384, inputs: range | None = None) -> tuple[int, int, bool] | None:
        found = layout_of_parts(parts, k, range(k) if inputs is None else inputs)
        return found and (found.format, found.group, found.has_offsets)

    int4, int8 = Format.INT4, Format.INT8
    assert of(NumberLayout(int8, 384)) == (int8, 384, False)
    assert of(NumberLayout(int8, 384), inputs=range(96, 192)) == (int8, 96, False)
    assert of(NumberLayout(int4, 128), NumberLayout(int4, 32, True)) == (int4, 32, True)
    assert of(NumberLayout(int4, 128), inputs=range(96, 192)) == (int4, 32, False)
    assert of(NumberLayout(int4, 384), k=384) == (int4, 384, False)
    assert of(NumberLayout(int4, 4000), k=4000) == (int4, 512, False)
    assert of(NumberLayout(int4, 1024), k=4096) == (int4, 512, False)
    ordered = NumberLayout(int4, 128, has_order=True)
    assert layout_of_parts([ordered, ordered], 384, range(384)) == ordered
    assert of(ordered, NumberLayout(int4, 128)) is None
    assert of(ordered, inputs=range(192)) is None  # which have parts of all groups
    assert of(NumberLayout(int4, 32), NumberLayout(int8, 384)) == (int8, 32, False)
    assert of(NumberLayout(int4, 32), NumberLayout(Format.TABLE4, 32)) is None
    assert of(NumberLayout(int4, 32), None) is None
    assert of(NumberLayout(int4, 12)) is None
    assert of(NumberLayout(int8, 384, True)) == (int8, 384, True)


def test_scales_are_repeated_where_groups_are_cut() -> None:
    scales = torch.arange(6.0).view(2, 3)
    assert regrouped(scales, 128, range(96, 192), 32).tolist() == [[0, 1, 1], [3, 4, 4]]
    assert regrouped(scales[:, :1], 384, range(384), 512).tolist() == [[0], [3]]
