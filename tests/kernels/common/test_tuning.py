"""Lookups of tuned configurations: the most specific table, and in it the first row that fits."""

import pytest
import torch

from diptych.kernels.common.tuning import ANY, CHIPS, DEVICE_VARIABLE, INTERPRETER, Tuned, chip_of, nvidia_kinds

TABLE = Tuned[str](
    generic=[((ANY, ANY), "generic")],
    h100=[((16, 64), "small"), ((16, ANY), "few rows"), ((ANY, ANY), "many rows")],
)


def test_the_first_row_that_fits_is_taken() -> None:
    found = [TABLE.of(CHIPS["h100"], *sizes) for sizes in [(1, 64), (16, 65), (17, 1)]]
    assert found == ["small", "few rows", "many rows"]


def test_a_device_without_a_table_takes_its_elders_and_else_the_generic_one() -> None:
    assert TABLE.of(CHIPS["h200"], 1, 1) == "small"
    assert TABLE.of(CHIPS["mi300x"], 1, 1) == TABLE.of(INTERPRETER, 1, 1) == "generic"


def test_a_table_that_does_not_cover_every_size_is_refused() -> None:
    with pytest.raises(AssertionError):
        Tuned[str](generic=[((16,), "small")])


def test_the_environment_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = torch.device("meta")
    for name, expected in (("", INTERPRETER), ("b200", CHIPS["b200"])):
        monkeypatch.setenv(DEVICE_VARIABLE, name)
        chip_of.cache_clear()
        assert chip_of(meta) is expected
    chip_of.cache_clear()


def test_gpus_of_small_shared_memory_take_no_rows_made_for_large_ones() -> None:
    assert nvidia_kinds(8, 9, 99 * 1024) == CHIPS["l40s"].kinds[1:] == ("sm_89", "sm_80")
    assert nvidia_kinds(12, 0, 99 * 1024) == ("sm_120", "sm_80")
    assert nvidia_kinds(9, 0, 227 * 1024) == CHIPS["h100"].kinds[1:]


def test_a_persistent_grid_has_as_many_programs_as_a_device_holds() -> None:
    assert [CHIPS["h100"].resident_programs(num_warps) for num_warps in (4, 16)] == [132 * 16, 132 * 4]
