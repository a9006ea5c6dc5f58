"""The library is refused where C++ and Python do not agree on a structure."""

import ctypes

import pytest

from diptych.kernels.cpu.library import Library, StaleLibrary, text_of
from diptych.kernels.cpu.load import MIRRORS, Fields, check_structs, mirrored, structs_of


@pytest.fixture
def compiled(built: Library) -> dict[str, Fields]:
    return structs_of(text_of(built.handle.diptych_structs))


def test_every_mirror_is_in_the_table_and_equal(compiled: dict[str, Fields]) -> None:
    assert compiled.keys() == MIRRORS.keys() | {"Best"}
    assert compiled["Linear"][""] == (0, ctypes.sizeof(MIRRORS["Linear"]))
    assert all(len(fields) > 2 for fields in compiled.values())
    check_structs(compiled, mirrored())


def test_every_field_is_in_the_table(compiled: dict[str, Fields]) -> None:
    for name, mirror in MIRRORS.items():
        assert set(compiled[name]) - {""} == {field for field, *_ in mirror._fields_}


def test_a_moved_field_is_refused(compiled: dict[str, Fields]) -> None:
    here = mirrored()
    here["Step"] = {**here["Step"], "logits": (here["Step"]["logits"][0] + 8, 8)}
    with pytest.raises(StaleLibrary, match=r"Step\.logits has"):
        check_structs(compiled, here)


def test_a_field_or_structure_too_many_or_too_few_is_refused(compiled: dict[str, Fields]) -> None:
    with pytest.raises(StaleLibrary, match=r"Rope\.angle has .* None in"):
        check_structs(compiled, {**mirrored(), "Rope": {**mirrored()["Rope"], "angle": (16, 8)}})
    with pytest.raises(StaleLibrary, match=r"Heads\.window has .* None in Python"):
        check_structs(
            compiled, {**mirrored(), "Heads": {n: f for n, f in mirrored()["Heads"].items() if n != "window"}}
        )
    with pytest.raises(StaleLibrary, match="New has"):
        check_structs({**compiled, "New": {"": (0, 8)}}, mirrored())


def test_a_larger_structure_is_refused(compiled: dict[str, Fields]) -> None:
    class Larger(ctypes.Structure):
        _fields_ = (*MIRRORS["Rope"]._fields_, ("more", ctypes.c_int64))

    with pytest.raises(StaleLibrary, match="Rope has"):
        check_structs(compiled, {**mirrored(), "Rope": {**mirrored()["Rope"], "": (0, ctypes.sizeof(Larger))}})
