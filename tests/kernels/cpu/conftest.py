"""Fixtures of the compiled kernels: every test of theirs runs with each instruction set that this machine has."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diptych.kernels.cpu.library import Library, Team
from diptych.kernels.cpu.load import library

HERE = Path(__file__).parent
ISAS = found.isas if (found := library()) else []
THREADS = [1, 3, 2]  # of a team; with two: long


def varies(item: pytest.Function) -> bool:
    """Return whether the item's cases are for several instruction sets."""
    return hasattr(item, "callspec") and "built" in item.callspec.params


def varied(item: pytest.Function) -> dict[str, str]:
    """What varies between the cases of a test: values by name; those that are given together, by the first's."""
    params, marks = item.callspec.params, [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [names for names in marks if not isinstance(names, str)]
    found = {name: str(value) for name, value in params.items() if not any(name in names for names in together)}
    return found | {names[0]: str([params[name] for name in names]) for names in together}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the tests in which three things or more vary, mark as long those cases whose values have numbers with a sum
    that is not a multiple of two, or of three where four or more vary. Each pair of values stays in the other cases."""
    numbers: dict[tuple[object, str], dict[str, int]] = {}  # of values, by test and by what varies
    cases: list[tuple[pytest.Function, dict[str, str]]] = []
    for item in items:
        if isinstance(item, pytest.Function) and item.path.is_relative_to(HERE) and varies(item):
            cases.append((item, varied(item)))
            for name, value in cases[-1][1].items():
                of_values = numbers.setdefault((item.function, name), {})
                of_values.setdefault(value, len(of_values))
    for item, values in cases:
        varying = [name for name in values if len(numbers[item.function, name]) > 1]
        total = sum(numbers[item.function, name][values[name]] for name in varying)
        if len(varying) >= 3 and total % (2 if len(varying) == 3 else 3):
            item.add_marker(pytest.mark.long)


@pytest.fixture(params=ISAS or [pytest.param("none", marks=pytest.mark.skip(reason="the kernels are not built"))])
def built(request: pytest.FixtureRequest) -> Library:
    kernels = library()
    assert kernels is not None
    return kernels.using(request.param)


@pytest.fixture(params=[pytest.param(num, marks=[pytest.mark.long] if num == 2 else []) for num in THREADS])
def team(built: Library, request: pytest.FixtureRequest) -> Iterator[Team]:
    made = Team(built, request.param)
    yield made
    made.close()


@pytest.fixture
def pair(built: Library) -> Iterator[Team]:
    made = Team(built, 2)
    yield made
    made.close()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
