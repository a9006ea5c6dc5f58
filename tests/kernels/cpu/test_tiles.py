"""Products by the matrix unit, which is emulated: the tests of the other instruction sets hold for it, too."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diptych.kernels.cpu.build import FLAGS, ISAS, SOURCES, find_compiler
from diptych.kernels.cpu.formats import Format, NumberLayout
from diptych.kernels.cpu.library import Library, Team
from diptych.kernels.cpu.linear import Epilogue, linear, pack, pack_numbers
from diptych.kernels.cpu.load import library

from . import test_linear, test_rows8
from .test_linear import operands, poisoned

BASE = "avx512bf16"
UNIT = Path(__file__).parent / "emulated_unit.h"


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The kernels that multiply, with an emulated matrix unit."""
    found = library()
    if found is None or BASE not in found.isas:
        pytest.skip(f"the kernels for {BASE} do not run here")
    path = tmp_path_factory.mktemp("tiles") / "tiles.so"
    sources = [str(SOURCES / name) for name in ("linear.cpp", "linear_pack.cpp", "team.cpp")]
    defines = (f"-DDIPTYCH_ISA={BASE}", f'-DDIPTYCH_MATRIX_UNIT="{UNIT}"', '-DDIPTYCH_SOURCES=""')
    command = [find_compiler(), *FLAGS, *ISAS[BASE], "-O1", "-w", *defines, "-pthread", "-shared", *sources]
    subprocess.run([*command, "-o", str(path)], check=True)
    return Library(ctypes.CDLL(str(path)), "amx")


@pytest.fixture
def built(emulated: Library) -> Library:
    """What `team` and `pair` compute with here."""
    return emulated


@pytest.mark.parametrize(
    "holds",
    [test_linear.test_product, test_linear.test_a_row_depends_on_itself_alone, test_linear.test_threads_do_not_matter],
)
@pytest.mark.parametrize("format", [Format.PLAIN, Format.INT8])
def test_what_holds_of_other_products(
    team: Team, dtype: torch.dtype, format: Format, holds: Callable[..., None]
) -> None:
    holds(team, dtype, format)


SUMS = test_linear.test_sum_without_a_bias, test_rows8.test_gate_and_sum
ROWS = test_rows8.test_product, test_rows8.test_a_row_depends_on_itself_alone


@pytest.mark.parametrize("holds", [*SUMS, *ROWS])
def test_what_holds_of_other_products_of_any_weights(
    pair: Team, dtype: torch.dtype, holds: Callable[..., None]
) -> None:
    holds(pair, dtype)


@pytest.mark.parametrize("epilogue", [Epilogue.SILU_MUL, Epilogue.GELU_MUL])
def test_gates(pair: Team, epilogue: Epilogue) -> None:
    test_linear.test_gate(pair, torch.bfloat16, epilogue, Format.PLAIN)
    test_linear.test_large_gates(pair, torch.bfloat16, epilogue)


def test_tiles_multiply(pair: Team, emulated: Library) -> None:
    """Sums of products in another order than vectors make them, within a few units of their last place."""
    x, weight, bias = operands(40, 70, 1030, torch.bfloat16)
    packed = pack(pair, [weight], bias)
    by_tiles = linear(pair, x, packed, out=torch.empty(40, 70))
    packed.of.by_tiles = 0
    by_vectors = linear(pair, x, packed, out=torch.empty(40, 70))
    assert not torch.equal(by_tiles, by_vectors)
    torch.testing.assert_close(by_tiles, by_vectors, rtol=1e-5, atol=3e-6)


def test_whole_numbers_have_the_same_sums(pair: Team) -> None:
    for num_rows in (1, 16, 17, 33, 100):
        x, of = torch.randn(num_rows, 1030), test_rows8.numbers(65, 1030)
        packed = pack_numbers(pair, [of], NumberLayout(Format.W8A8, 1030), torch.float32)
        assert packed.of.by_tiles
        by_tiles = linear(pair, x, packed)
        packed.of.by_tiles = 0
        assert torch.equal(linear(pair, x, packed), by_tiles)


def test_what_lies_beyond_a_row_is_not_read(pair: Team) -> None:
    for k in (1, 31, 33, 63, 65):
        x, weight, _ = operands(18, 33, k, torch.bfloat16)
        packed = pack(pair, [weight])
        wanted = linear(pair, x.contiguous(), packed)
        for beyond in (torch.nan, 0.0, 1e30):
            wide = poisoned(18, k, torch.bfloat16)
            assert wide._base is not None
            wide._base.fill_(beyond)
            assert torch.equal(linear(pair, wide.copy_(x), packed), wanted)


def test_the_unit_is_used_where_the_processor_has_it() -> None:
    if (found := library()) is None or "amx" not in found.isas:
        pytest.skip("the processor has no matrix unit, or the system does not lend it")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line.split(":")[1].split() for line in lines if line.startswith("flags"))
    assert {"amx_tile", "amx_bf16", "amx_int8"} <= set(flags) and found.isas[0] == "amx"
    assert pack(Team(found, 1), [torch.randn(4, 4)]).of.by_tiles
