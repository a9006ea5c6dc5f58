"""Workers that share experts on fake devices, each a ModelRunner of this process, and what each of their steps was."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution.common.peer_backend import PeerBackend
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.ranks.agreed_step import StepSize

from .serving import load

T = TypeVar("T")


@dataclass
class PeerRunner:
    rank: int
    runner: ModelRunner
    device: FakeDevice
    steps: list[StepSize] = field(default_factory=list[StepSize])

    def __post_init__(self) -> None:
        backend = self.runner.backend
        assert isinstance(backend, PeerBackend)
        launch, serve = backend.steps.launch_agreed, backend.steps.serve
        self.num_served = 0

        def launched(batch: Any, watch: Any, step: StepSize) -> Any:
            self.steps.append(step)
            return launch(batch, watch, step)

        def served(step: StepSize) -> None:
            self.steps.append(step)
            self.num_served += 1
            serve(step)

        backend.steps.launch_agreed, backend.steps.serve = launched, served  # type: ignore[method-assign]


def together(work: Callable[..., T], *each: Sequence[Any]) -> list[T]:
    """Do the work with each group of arguments, on a thread each."""
    with ThreadPoolExecutor(len(each[0])) as threads:
        return list(threads.map(work, *each))


@contextmanager
def peers(
    path: Path, folder: Path, own: Sequence[dict[str, Any]] = ({}, {}), *, is_late: bool = True, **changes: Any
) -> Generator[list[PeerRunner]]:
    """own: settings of each worker; changes: of all. folder: where they meet."""

    def make(rank: int) -> PeerRunner:
        device = FakeDevice(is_late=is_late)
        shared = {"data_parallel": len(own), "data_rank": rank, "rendezvous": str(folder / "rendezvous")}
        return PeerRunner(rank, load(path, device, **shared | changes | own[rank]), device)

    made = together(make, range(len(own)))
    try:
        yield made
    finally:
        together(lambda of: of.runner.close(), made)
