"""The delays of `make busy`."""

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "support" / "busy_machine"
SHOW = "import subprocess, sys, time; print(time.monotonic.__name__)"


def read_here() -> None:
    time.perf_counter()


def read_there() -> None:
    time.perf_counter()


def test_the_first_readings_of_a_second_at_a_place_are_delayed_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUSY", raising=False)
    slept, now = list[float](), [0.0]
    monkeypatch.setattr(time, "sleep", slept.append)
    for name in ("monotonic", "perf_counter", "time"):
        monkeypatch.setattr(time, name, lambda: now[0])
    runpy.run_path(str(FOLDER / "sitecustomize.py"))["delay_readings"](1.0, 0.05, 1)
    for _ in range(3):
        read_here()
    assert len(slept) == 3 and all(0 <= seconds <= 0.1 for seconds in slept)
    for _ in range(1000):
        read_here()
    assert 3 < len(slept) < 40
    num_before = len(slept)
    read_there()
    now[0] = 1.5
    read_here()
    assert len(slept) == num_before + 2


@pytest.mark.parametrize(("given", "expected"), [({"BUSY": "0.1:0.01:1"}, "read_late"), ({}, "monotonic")])
def test_each_process_with_the_folder_in_its_path_is_delayed(given: dict[str, str], expected: str) -> None:
    shown = f"{SHOW}; print(subprocess.run([sys.executable, '-c', {SHOW!r}], capture_output=True, text=True).stdout)"
    usual = {name: value for name, value in os.environ.items() if name != "BUSY"}
    run = subprocess.run(
        [sys.executable, "-c", shown],
        env=usual | given | {"PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [expected] * 2
