"""Profile of a cluster's workers and links: step logs (workers/engine/step_log.py) and metrics of a running cluster ->
weights of its steps' time, speed of its hand-offs. Workers of different numbers of threads each have weights of their
own.
"""

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter, ValidationError

from ...workers.common.errors import ConfigError, WorkloadError
from ...workers.costs.step_log_format import COLUMNS, StepLogHeader
from .contention import Steps, fit_with_contention, overlap_of, predicted
from .timing import FittedTimer, Weights
from .transfers import AUTO_GROUPS
from .worker_setup import TransitTimes

QUANTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
LEAST_STEPS = 50
MOST_GAP_STEPS = 1.0  # between two steps, in median steps: after a longer time there was nothing to compute
LINK_METRICS = ("diptych_link_bytes_total", "diptych_link_read_seconds_total")
HANDOFF_METRIC, PULL_METRIC = "diptych_handoff_last_segment_seconds", "diptych_handoff_pull_seconds"


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """Times of steps, measured. `by_role`: share of that time which workers of a role take; `contention`: share by
    which a step takes longer while another worker of the machine computes; `gap_s`: from the end of a step to the next
    one's begin, where sequences run on; `residuals`: measured by predicted seconds, by percentile."""

    worker: StepLogHeader
    weights: Weights  # seconds, of a worker alone
    by_role: dict[str, float]
    contention: float
    gap_s: float
    num_steps: int
    residuals: dict[int, float]
    transit: TransitTimes = field(default_factory=TransitTimes)

    def weights_of(self, role: str) -> Weights:
        """Weights of the steps of workers in a role."""
        factor = self.by_role.get(role, 1.0)
        fixed, decode, context, prefill, pair, hidden = (weight * factor for weight in self.weights)
        return fixed, decode, context, prefill, pair, hidden

    def timer(self, role: str) -> FittedTimer:
        """Time from the begin of a step to that of the next."""
        fixed, decode, context, prefill, pair, hidden = self.weights_of(role)
        return FittedTimer((fixed + self.gap_s, decode, context, prefill, pair, hidden))

    @property
    def per_machine(self) -> int:
        """Number of such workers that have cores for themselves on a machine."""
        return max(self.worker.cores // max(self.worker.threads * self.worker.tensor_parallel, 1), 1)


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """`latency_s`: from the end of a prompt's last step until its sink has the KV, beside the bytes."""

    bytes_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of a cluster."""

    date: str  # ISO 8601
    workers: tuple[WorkerProfile, ...]
    link: LinkProfile | None = None

    def of_threads(self, threads: int | None) -> WorkerProfile:
        """Profile of the workers with so many threads. Raises ConfigError."""
        found = [worker for worker in self.workers if worker.worker.threads == threads]
        if found or len(self.workers) == 1:
            return (found or self.workers)[0]
        known = ", ".join(str(worker.worker.threads) for worker in self.workers)
        raise ConfigError(f"the profile has workers of {known} threads: set `threads` of each pool to one of these")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_profile(path: Path) -> Profile:
    """Raises ConfigError."""
    try:
        return TypeAdapter(Profile).validate_json(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}. Make a profile with `diptych profile`") from e
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is not a profile of `diptych profile`: {where}: {first['msg']}") from e


def make_profile(folder: Path, link: LinkProfile | None = None) -> Profile:
    """Fit the step logs of a folder: all of one model and machine. Raises WorkloadError."""
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise WorkloadError(f"{folder} holds no step logs (*.csv): set step_log to it, and send the cluster a load")
    logs: dict[StepLogHeader, list[_Log]] = {}
    for path in paths:
        header, steps = read_log(path)
        if len(steps):
            logs.setdefault(replace(header, role=""), []).append(_Log(header.role, steps))
    if not logs:
        raise WorkloadError(f"{folder} holds step logs without steps: send a load, and stop the cluster")
    if len({header.threads for header in logs}) < len(logs):
        raise WorkloadError(
            f"{folder} holds step logs of workers that differ in more than threads: {'; '.join(map(str, logs))}"
        )
    for header, found in logs.items():
        if (num := sum(len(log.steps) for log in found)) < LEAST_STEPS:
            raise WorkloadError(
                f"{folder} holds {num} steps of workers with {header.threads} threads, and {LEAST_STEPS} are needed: "
                "send a longer load"
            )
    everywhere = [log.steps for found in logs.values() for log in found]
    workers = tuple(
        _fit(header, found, everywhere) for header, found in sorted(logs.items(), key=lambda item: item[0].threads)
    )
    return Profile(datetime.now(UTC).isoformat(timespec="seconds"), workers, link)


@dataclass(frozen=True, slots=True)
class _Log:
    role: str
    steps: Steps


def _fit(header: StepLogHeader, logs: Sequence[_Log], everywhere: Sequence[Steps]) -> WorkerProfile:
    """`everywhere`: the steps of all workers, these ones included."""
    all_steps = [log.steps for log in logs]
    overlaps = [overlap_of(steps, [other for other in everywhere if other is not steps]) for steps in all_steps]
    weights, contention = fit_with_contention(all_steps, overlaps)
    expected = [
        predicted(steps, weights) * (1 + contention * overlap)
        for steps, overlap in zip(all_steps, overlaps, strict=True)
    ]
    measured_s, expected_s = dict[str, float](), dict[str, float]()
    for log, each in zip(logs, expected, strict=True):
        measured_s[log.role] = measured_s.get(log.role, 0.0) + float(log.steps[:, 5].sum())
        expected_s[log.role] = expected_s.get(log.role, 0.0) + float(each.sum())
    by_role = {role: measured_s[role] / expected_s[role] for role in sorted(measured_s)}
    ratios = np.concatenate(
        [log.steps[:, 5] / each / by_role[log.role] for log, each in zip(logs, expected, strict=True)]
    )
    residuals = dict[int, float](zip(QUANTILES, np.percentile(ratios, QUANTILES).tolist(), strict=True))
    return WorkerProfile(header, weights, by_role, contention, _gap_s(all_steps), len(ratios), residuals)


def _gap_s(logs: Iterable[Steps]) -> float:
    """Median time between a step and the next, where that decodes and follows soon."""
    found: list[Steps] = []
    for steps in logs:
        began, num_decodes, seconds = steps[:, 0], steps[:, 1], steps[:, 5]
        gaps = began[1:] - (began + seconds)[:-1]
        follows = (num_decodes[1:] > 0) & (num_decodes[:-1] > 0) & (gaps <= MOST_GAP_STEPS * np.median(seconds))
        found.append(np.maximum(gaps[follows], 0.0))
    gaps = np.concatenate(found)
    return float(np.median(gaps)) if len(gaps) else 0.0


def read_link(path: Path) -> LinkProfile:
    """Speed of the hand-offs in metrics that a router's /metrics gave. Raises WorkloadError."""
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except OSError as e:
        raise WorkloadError(f"cannot read {path}: {e.strerror}. Save /metrics of a router to it") from e
    except ValueError as e:
        raise WorkloadError(f"{path} does not hold metrics in the format of Prometheus: {e}") from e
    num_bytes, read_s = (sums.get(name, 0.0) for name in LINK_METRICS)
    num_handoffs = sums.get(f"{HANDOFF_METRIC}_count", 0.0)
    if not (num_bytes > 0 and read_s > 0 and num_handoffs > 0):
        raise WorkloadError(f"{path} contains no hand-off: send a load to a cluster of prefill and decode workers")
    # The last group's bytes are moved in that time too, and counted by their number.
    beside_s = sums[f"{HANDOFF_METRIC}_sum"] - sums.get(f"{PULL_METRIC}_sum", 0.0) / AUTO_GROUPS
    return LinkProfile(num_bytes / read_s, max(beside_s, 0.0) / num_handoffs)


def read_log(path: Path) -> tuple[StepLogHeader, Steps]:
    """Header and steps of a step log. Raises WorkloadError."""
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
        raise WorkloadError(f"{path} line 1: the header of the step log is invalid: {e.errors()[0]['msg']}") from e
    return header, np.array(steps, dtype=np.float64).reshape(-1, len(COLUMNS))


def _step(row: Sequence[str], where: str) -> list[float]:
    try:
        step = [float(value) for value in row]
    except ValueError:
        step = [-1.0]
    if not (all(0 <= value < 1e15 for value in step) and step[-1] > 0):
        raise WorkloadError(
            f"{where}: a step must be {','.join(COLUMNS)}, each a number of at least 0, got {','.join(row)}"
        )
    return step
