"""Threads of the compiled kernels: they end with their Team, and compute the same however many they are."""

import gc
import os
import random
import sys
from pathlib import Path

import pytest
import torch

from diptych.kernels.cpu.library import Library, Team
from diptych.kernels.cpu.rows import embed


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


@pytest.mark.parametrize("num_changes", [500, pytest.param(3000, marks=pytest.mark.long)])
def test_a_team_computes_the_same_while_its_size_changes(built: Library, num_changes: int) -> None:
    """At random: threads wake late, sleep, and come back, while kernels follow each other closely."""
    team, rng = Team(built, 4, num_active=1), random.Random(1)
    table = torch.randn(64, 31)
    ids = torch.randint(64, (200,))
    expected = table[ids]
    for _ in range(num_changes):
        team.resize([0] * rng.randint(1, 4))
        for _ in range(rng.randint(0, 3)):
            assert torch.equal(embed(team, ids, table), expected)
    team.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound to cores on Linux alone")
def test_a_thread_computes_on_the_core_that_it_is_given(built: Library) -> None:
    table, ids, cores = torch.randn(64, 31), torch.randint(64, (200,)), sorted(os.sched_getaffinity(0))
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    team = Team(built, 2, [cores[0], cores[0]])
    [thread] = {task.name for task in Path("/proc/self/task").iterdir()} - before
    for core in (cores[0], cores[-1]):
        team.resize([cores[0], core])
        embed(team, ids, table)
        assert os.sched_getaffinity(int(thread)) == {core}
    team.close()


def test_a_team_closes_while_threads_sleep(built: Library) -> None:
    for num_active in (1, 2, 3):
        Team(built, 3, num_active=num_active).close()
    with pytest.raises(AssertionError):
        Team(built, 2, num_active=3)
