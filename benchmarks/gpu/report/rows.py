"""Rows of a report: each is a line of figures.jsonl from the moment in which it is known. Knows no torch.

Whoever measures calls `put`. Which file, part and job a row belongs to stands in the environment that gpu_report.py
gives its jobs, so what they start in turn may write too; without it nothing is written.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

FILE, PART, JOB = "GPU_REPORT_FILE", "GPU_REPORT_PART", "GPU_REPORT_JOB"

FIGURE, FACT, PROBLEM, SKIPPED = "figures", "facts", "problems", "skipped"  # kinds of rows, beside those of parts


def environment(file: Path, part: str, job: str) -> dict[str, str]:
    return {FILE: str(file), PART: part, JOB: job}


def put(kind: str, **fields: Any) -> None:
    """Append a row. kind: the table in which it stands."""
    if (file := os.environ.get(FILE)) is not None:
        append(Path(file), {"part": os.environ.get(PART, ""), "job": os.environ.get(JOB, ""), "kind": kind, **fields})


def append(file: Path, row: dict[str, Any]) -> None:
    """Append a line, by one write: those of several processes do not mix."""
    line = json.dumps(_finite(row), default=str) + "\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; a line that was cut off counts for nothing."""
    if not file.exists():
        return []
    found: list[dict[str, Any]] = []
    for line in file.read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def replace_file(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    beside = file.with_name(file.name + ".new")
    beside.write_text(text)
    beside.replace(file)


def _finite(value: Any) -> Any:
    """The same, with what JSON has no number for as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
