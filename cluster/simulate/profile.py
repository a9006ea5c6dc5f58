"""Profile of a worker: step logs of a running cluster (workers/engine/step_log.py) -> weights of its steps' time.

A log begins with a line of JSON that says whose it is; then there is a line for each step.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from ...workers.common.errors import ConfigError, WorkloadError
from ...workers.core.step_log_format import COLUMNS, StepLogHeader
from .timing import LinearTimer, Weights, fit_weights

QUANTILES = (1, 10, 50, 90, 99)
LEAST_STEPS = 50


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """Time of steps, measured. `residuals`: measured by predicted seconds, by percentile."""

    worker: StepLogHeader
    weights: Weights  # seconds
    num_steps: int
    residuals: dict[int, float]

    @property
    def timer(self) -> LinearTimer:
        return LinearTimer(self.weights)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_profile(path: Path) -> WorkerProfile:
    """Raises ConfigError."""
    try:
        return TypeAdapter(WorkerProfile).validate_json(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}. Make a profile with `diptych profile`") from e
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is no profile of `diptych profile`: {where}: {first['msg']}") from e


def make_profile(folder: Path) -> WorkerProfile:
    """Fit the step logs of a folder: all of one model and machine. Raises WorkloadError."""
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise WorkloadError(f"{folder} holds no step logs (*.csv): set step_log to it, and send the cluster a load")
    logs = [_read_log(path) for path in paths]
    headers = {header for header, _ in logs}
    if len(headers) > 1:
        raise WorkloadError(f"{folder} holds step logs of unlike workers: {'; '.join(sorted(map(str, headers)))}")
    steps = np.concatenate([steps for _, steps in logs])
    if len(steps) < LEAST_STEPS:
        raise WorkloadError(f"{folder} holds {len(steps)} steps and {LEAST_STEPS} are needed: send a longer load")
    weights = fit_weights(steps)
    predicted = np.column_stack([np.ones(len(steps)), steps[:, :4]]) @ np.array(weights)
    ratios = np.percentile(steps[:, 4] / predicted, QUANTILES).tolist()
    return WorkerProfile(logs[0][0], weights, len(steps), dict(zip(QUANTILES, ratios, strict=True)))


def _read_log(path: Path) -> tuple[StepLogHeader, npt.NDArray[np.float64]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header = TypeAdapter(StepLogHeader).validate_json(file.readline())
            rows: Any = csv.reader(file)
            if next(rows, None) != list(COLUMNS):
                raise WorkloadError(f"{path} line 2: the columns must be {','.join(COLUMNS)}")
            steps = [_step(row, f"{path} line {rows.line_num + 1}") for row in rows if len(row) == len(COLUMNS)]
    except OSError as e:
        raise WorkloadError(f"cannot read {path}: {e.strerror}") from e
    except ValidationError as e:
        raise WorkloadError(f"{path} line 1: it does not say whose step log it is: {e.errors()[0]['msg']}") from e
    return header, np.array(steps, dtype=np.float64).reshape(-1, len(COLUMNS))


def _step(row: Sequence[str], where: str) -> list[float]:
    try:
        step = [float(value) for value in row]
    except ValueError:
        step = [-1.0]
    if not (all(0 <= value < 1e15 for value in step) and step[-1] > 0):
        raise WorkloadError(f"{where}: a step is {','.join(COLUMNS)}, numbers from 0 on, got {','.join(row)}")
    return step
