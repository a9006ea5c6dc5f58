"""The benchmarks of methods of KV in 4 bits: KIVI is nearer than the transform of each vector."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines_of(*arguments: str) -> list[list[str]]:
    """Words of each line that a benchmark prints."""
    command = [sys.executable, "-m", *arguments]
    printed = subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True, text=True).stdout
    return [line.split() for line in printed.splitlines()]


def test_kivi_is_nearer_than_the_transform() -> None:
    names = ("transform", "channels 32 + own 32")
    rows = lines_of("benchmarks.engine.kv_methods", "--texts", "1", "--only", *names)[2:]
    assert [row[-5:-3] for row in rows] == [["4.500", "4.125"], ["5.000", "4.625"]]
    transform, kivi = (float(row[-1]) for row in rows)  # mean difference of log-probabilities
    assert 0 < kivi < transform / 2
