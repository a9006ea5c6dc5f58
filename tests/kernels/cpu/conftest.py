"""Fixtures of the compiled kernels: every test of theirs runs with each instruction set that this machine has."""

from collections.abc import Iterator

import pytest
import torch

from diptych.kernels.cpu.library import Library, Team
from diptych.kernels.cpu.load import library

ISAS = found.isas if (found := library()) else []


@pytest.fixture(params=ISAS or [pytest.param("none", marks=pytest.mark.skip(reason="the kernels are not built"))])
def built(request: pytest.FixtureRequest) -> Library:
    kernels = library()
    assert kernels is not None
    return kernels.using(request.param)


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.long), 3])
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
