"""Binding threads to cores."""

import os
import threading
from pathlib import Path

import pytest

from diptych.workers.common.cores import (
    affinity_kept,
    bind_this_thread,
    cores_to_serve,
    cpus_of_this_thread,
    openmp_settings,
    part_of,
    usable_cores,
)

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads")


def test_ranks_share_a_workers_cores() -> None:
    assert part_of((4, 5, 6, 7), 0, 2) == (4, 5)
    assert part_of((4, 5, 6, 7), 1, 2) == (6, 7)
    assert part_of((4, 5, 6), 1, 2) == (5,), "equal parts: a step is as slow as its slowest rank"
    assert part_of((4,), 0, 2) is None
    assert part_of(None, 0, 1) is None


def test_what_does_not_compute_leaves_the_cores_to_the_steps() -> None:
    for role in ("decode", "mixed"):
        assert cores_to_serve((2, 3), range(5), role) == (0, 1, 4)
        assert cores_to_serve((0, 1), (0, 1), role) is None, "no others are left: anywhere"
    assert cores_to_serve((2, 3), range(5), "prefill") == (2, 3), "not in the way of who decodes"
    for role in ("decode", "mixed", "prefill"):
        assert cores_to_serve(None, range(5), role) is None


def test_openmp_gets_a_place_a_core() -> None:
    assert openmp_settings((2, 5)) == {"OMP_PROC_BIND": "close", "OMP_PLACES": "{2},{5}"}
    assert openmp_settings(None) == {}


@linux
def test_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert usable_cores(tmp_path) == (0, 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3})
    assert usable_cores(tmp_path) == (2, 3)
    assert usable_cores(tmp_path / "elsewhere") == (2, 3), "where nothing is said of siblings, each counts"


@linux
def test_a_thread_is_bound_alone() -> None:
    before = os.sched_getaffinity(0)
    assert set(cpus_of_this_thread()) == before
    core = min(before)
    found: list[set[int]] = []

    def run() -> None:
        assert bind_this_thread((core,))
        found.append(os.sched_getaffinity(0))
        with affinity_kept():
            os.sched_setaffinity(0, before)
        found.append(os.sched_getaffinity(0))
        assert not bind_this_thread(None)
        assert not bind_this_thread((1 << 15,)), "a core that is not there"
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [{core}] * 3
    assert os.sched_getaffinity(0) == before
