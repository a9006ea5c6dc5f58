"""Log of a worker's steps, for `diptych profile`: what each computed and how long it took. A step costs a few µs."""

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

from ..common.errors import ConfigError
from ..config.worker_config import WorkerConfig
from ..core.runner import Runner
from ..costs.step_cost import StepWork
from ..costs.step_log_format import COLUMNS, StepLogHeader

LINES_AT_ONCE = 64
CPUINFO = Path("/proc/cpuinfo")


class StepLog:
    """Appends to a file of its own in `folder`, which it makes. Raises ConfigError where it cannot."""

    def __init__(self, folder: Path, name: str, header: StepLogHeader) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{name}.csv").open("w", encoding="utf-8")
        except OSError as e:
            raise ConfigError(f"step_log: cannot write to {folder}: {e.strerror}") from e
        self._lines = [json.dumps(asdict(header)) + "\n", ",".join(COLUMNS) + "\n"]
        self.flush()

    def add(self, began: float, work: StepWork, seconds: float) -> None:
        counts = f"{work.num_decodes},{work.num_context},{work.num_prefill},{work.num_pairs:.10g}"
        self._lines.append(f"{began:.6f},{counts},{seconds:.9f}\n")
        if len(self._lines) >= LINES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what is kept. A full disk loses steps, and nothing else."""
        lines, self._lines = self._lines, []
        try:
            self._file.writelines(lines)
            self._file.flush()
        except OSError:
            return

    def close(self) -> None:
        self.flush()
        self._file.close()


def open_step_log(config: WorkerConfig, runner: Runner, name: str) -> StepLog | None:
    """Open the log that the settings ask for. Raises ConfigError."""
    folder = config.model.step_log
    return None if folder is None else StepLog(Path(folder), name, _header(config, runner))


def _header(config: WorkerConfig, runner: Runner) -> StepLogHeader:
    layout = runner.layout
    return StepLogHeader(
        model=config.model.name,
        dtype=config.model.dtype,
        device=config.model.device,
        role=config.role,
        threads=config.threads or 0,
        tensor_parallel=config.parallel.tensor_parallel,
        block_size=layout.block_size,
        num_blocks=runner.memory.num_blocks,
        kv_token_bytes=layout.block_bytes / layout.block_size,
        machine=_processor(),
        cores=os.cpu_count() or 1,
    )


def _processor() -> str:
    """Name of the processor; where the system does not say, its architecture."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
