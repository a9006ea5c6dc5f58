"""Instructions that widen bytes, computed on the host for each byte: no interpreter runs them, and tests on a GPU see
only what comes of many together."""

import re

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.stored_bytes import layout_of, stored_words, widening_of
from diptych.kernels.common.tuning import CHIPS

STORED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def every_byte(dtype: torch.dtype) -> Tensor:
    """[256] of `dtype`, but that floats are finite: as what is stored."""
    stored = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    return torch.where(stored.float().isfinite(), stored.float(), torch.zeros(256)).to(dtype)


def permuted(low: int, high: int, selector: int) -> int:
    """prmt.b32: each byte of the result is one of eight, or its sign."""
    given = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(
        bytes((255 if given[c & 7] >> 7 else 0) if c & 8 else given[c] for c in chosen),
        "little",
    )


def multiplied(kind: str, *registers: int) -> int:
    """fma.rn of three registers, each two 16-bit floats: computed exactly, then rounded."""
    words = torch.tensor([[x & 0xFFFF, x >> 16] for x in registers], dtype=torch.int32).to(torch.uint16)
    x, y, z = words.view(HALVES[kind]).double()
    low, high = (x * y + z).to(HALVES[kind]).view(torch.uint16).tolist()
    return low | high << 16


def computed(ptx: str, given: int) -> list[int]:
    """Run `ptx` on one register, the last that it reads. Returns its results."""
    registers = {max(re.findall(r"\$\d", ptx)): given}
    for line in ptx.splitlines():
        if not (found := re.match(r"\s+(\w+)\.(\S+) (.*);", line)):
            continue
        name, kind, target, *sources = (found[1], found[2], *found[3].split(", "))
        values = [registers[s] if s in registers else int(s, 0) for s in sources]
        if name == "fma":
            registers[target] = multiplied(kind.removeprefix("rn.").removesuffix("x2"), *values)
        elif name == "prmt":
            registers[target] = permuted(*values)
        else:
            of = {
                "mov": lambda a: a,
                "and": int.__and__,
                "xor": int.__xor__,
                "shl": int.__lshift__,
                "shr": int.__rshift__,
            }
            registers[target] = of[name](*values) & 0xFFFFFFFF
    return [registers[name] for name in sorted(registers) if name.startswith("$")][:-1]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", HALVES)
def test_every_byte_is_widened_exactly(stored: torch.dtype, kind: str) -> None:
    numbers = every_byte(stored)
    widening = widening_of(CHIPS["h200"], numbers, HALVES[kind])
    # Each byte is once at each of a register's four places, beside others.
    for shift in range(4):
        given = numbers.view(torch.uint8).roll(shift).view(torch.int32)
        found = [computed(widening.ptx, word & 0xFFFFFFFF) for word in given.tolist()]
        bits = torch.tensor([[half for x in pair for half in (x & 0xFFFF, x >> 16)] for pair in found])
        wide = bits.to(torch.uint16).view(HALVES[kind]).float() * widening.unit
        first, second = wide[:, :2].flatten(), wide[:, 2:].flatten()
        expected = numbers.view(torch.uint8).roll(shift).view(stored).float().view(-1, 2)
        assert torch.equal(first, expected[:, 0]) and torch.equal(second, expected[:, 1])


@pytest.mark.parametrize("kind", HALVES)
def test_every_byte_of_4_bit_numbers_is_widened_exactly(kind: str) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    widening = widening_of(CHIPS["h200"], codes, HALVES[kind])
    for shift in range(4):
        given = codes.roll(shift)
        found = [computed(widening.ptx, word & 0xFFFFFFFF) for word in given.view(torch.int32).tolist()]
        bits = torch.tensor([[[x & 0xFFFF, x >> 16] for x in of] for of in found])
        wide = bits.to(torch.uint16).view(HALVES[kind]).float() * widening.unit
        low, high = (given & 15).float() * 2 - 15, (given >> 4).float() * 2 - 15
        for part, expected in enumerate((low[::2], high[::2], low[1::2], high[1::2])):
            assert torch.equal(wide[:, part].flatten(), expected)


def test_other_chips_and_wider_queries_have_no_instructions_of_nvidias() -> None:
    for stored in (*STORED, torch.uint8):
        numbers = every_byte(stored)
        assert not widening_of(CHIPS["mi300x"], numbers, torch.bfloat16).ptx
        assert not widening_of(CHIPS["h200"], numbers, torch.float32).ptx
    assert not widening_of(CHIPS["h200"], torch.zeros(2, dtype=torch.bfloat16), torch.bfloat16).ptx


def test_words_are_of_neighbours() -> None:
    cache = torch.arange(-8, 8, dtype=torch.int8).view(2, 2, 4)
    words = stored_words(cache)
    assert words.shape == (2, 2, 2)
    assert torch.equal(words << 8 >> 8, cache[..., ::2].short()) and torch.equal(words >> 8, cache[..., 1::2].short())
    of_4_bits = stored_words(cache.view(torch.uint8))
    assert of_4_bits.shape == (2, 2, 2) and torch.equal(of_4_bits.view(torch.int16), words)


def test_layout() -> None:
    assert layout_of(torch.zeros(2, 80)) == {"PARTS": 1, "TRANSFORM": 0}
    assert layout_of(torch.zeros(2, 80, dtype=torch.int8)) == {"PARTS": 2, "TRANSFORM": 0}
    assert layout_of(torch.zeros(2, 40, dtype=torch.uint8)) == {"PARTS": 4, "TRANSFORM": 8}
