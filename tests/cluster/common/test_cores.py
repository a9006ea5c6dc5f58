"""Each core belongs to one worker until that worker ends."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.cluster.common.cores import CoreClaim, choose_cores


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Four cores."""
    for core in range(4):
        (tmp_path / f"cpu{core}").mkdir()
    return tmp_path


def test_neighbours_are_chosen_as_low_as_they_are_free() -> None:
    cores = (0, 1, 2, 3)
    assert choose_cores(cores, (), 2) == (0, 1)
    assert choose_cores(cores, (0,), 2) == (1, 2)
    assert choose_cores(cores, (1,), 2) == (2, 3)
    assert choose_cores(cores, (1,), 3) is None
    assert choose_cores(cores, (), 5) is None
    assert choose_cores(cores, (), 0) is None
    assert choose_cores((0, 2, 4), (0,), 2) == (2, 4), "one logical CPU a core"


@given(st.sets(st.integers(0, 15)), st.integers(1, 16))
def test_what_is_chosen_is_free_and_whole(taken: set[int], num: int) -> None:
    chosen = choose_cores(range(16), taken, num)
    if chosen is None:
        assert all(taken & set(range(first, first + num)) for first in range(16 - num + 1))
    else:
        assert len(chosen) == num and not taken & set(chosen)


def test_claims_are_disjoint_and_end(machine: Path) -> None:
    one, two, three = CoreClaim(machine), CoreClaim(machine), CoreClaim(machine)
    assert one.take(range(4), 1) == (0,)
    assert two.take(range(4), 2) == (1, 2)
    assert three.take(range(4), 2) is None, "one is left: it takes none"
    one.release()
    assert CoreClaim(machine).take(range(4), 2) is None, "two are free, and no neighbours"
    two.release()
    assert three.take(range(4), 4) == (0, 1, 2, 3)
    three.release()
    three.release()


def test_nothing_is_claimed_where_nothing_is_asked_or_known(machine: Path, tmp_path: Path) -> None:
    assert CoreClaim(machine).take(range(4), 0) is None
    assert CoreClaim(tmp_path / "elsewhere").take(range(4), 1) is None
    claim = CoreClaim(machine)
    assert claim.take(range(5), 1) is None, "the fifth has no file"
    assert CoreClaim(machine).take(range(4), 4) == (0, 1, 2, 3), "and holds none of the others"
