"""Threads of the compiled kernels end with their Team, however it ends."""

import gc

import pytest

from diptych.kernels.cpu.library import Library, Team


def test_a_team_ends_once_whether_it_is_closed_or_dropped(built: Library) -> None:
    closed, dropped = Team(built, 3), Team(built, 2)
    ends = closed._end, dropped._end
    assert all(end.alive and not end.atexit for end in ends)
    closed.close()
    closed.close()
    del dropped
    gc.collect()
    assert closed.address == 0 and not any(end.alive for end in ends)


def test_a_team_that_could_not_be_made_has_nothing_to_end(built: Library) -> None:
    """What is raised while an object is dropped is a warning, and so fails this."""
    with pytest.raises(AssertionError):
        Team(built, 0)
    gc.collect()
