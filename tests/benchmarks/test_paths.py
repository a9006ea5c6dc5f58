"""A request passes few files of ours; the counts are a script's that anyone can run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.kernels.cpu.load import library

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^(\S.*?) +(\d+) files +(\d+) calls$", re.MULTILINE)


@pytest.mark.skipif(library() is None, reason="the compiled kernels are not built")
def test_a_request_passes_few_files() -> None:
    # What only comes beside some of them on a busy machine does not count.
    command = [sys.executable, "-m", "benchmarks.serving.paths", "--repeats", "20"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    found = {title: (int(files), int(calls)) for title, files, calls in ROW.findall(run.stdout)}
    assert 10 <= found["of it, the relay"][0] <= 20
    assert 30 <= found["a decode step, from the scheduler to HTTP"][0] <= 50
    assert 100 <= found["a decode step, from the scheduler to HTTP"][1] <= 220
    assert 5 <= found["a released lease, from the source's gRPC to its blocks"][0] <= 20
