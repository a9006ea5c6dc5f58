"""Workers that share experts on fake devices, each a ModelRunner of this process, and what each of their steps was."""

import random
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution.common.peer_backend import PeerBackend
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.parallel.rendezvous import PeerSockets
from diptych.workers.ranks.agreed_step import PassesSize, StepSize

from .serving import load

T = TypeVar("T")


@dataclass
class PeerRunner:
    rank: int
    runner: ModelRunner
    device: FakeDevice
    steps: list[StepSize | PassesSize] = field(default_factory=list[StepSize | PassesSize])

    def __post_init__(self) -> None:
        backend = self.runner.backend
        assert isinstance(backend, PeerBackend)
        launch, serve, draft = backend.steps.launch_agreed, backend.steps.serve, backend._draft
        self.num_served = self.num_shared = 0

        def launched(batch: Any, watch: Any, step: StepSize) -> Any:
            self.steps.append(step)
            return launch(batch, watch, step)

        def served(step: StepSize) -> None:
            self.steps.append(step)
            self.num_served += 1
            serve(step)

        def drafted(compute: Any) -> Any:
            assert isinstance(backend._step, PassesSize)
            self.steps.append(backend._step)
            self.num_shared += 1
            return draft(compute)

        backend.steps.launch_agreed, backend.steps.serve = launched, served  # type: ignore[method-assign]
        backend._draft = drafted  # type: ignore[method-assign]


def together(work: Callable[..., T], *each: Sequence[Any]) -> list[T]:
    """Do the work with each group of arguments, on a thread each."""
    with ThreadPoolExecutor(len(each[0])) as threads:
        return list(threads.map(work, *each))


@contextmanager
def peers(
    path: Path, folder: Path, own: Sequence[dict[str, Any]] = ({}, {}), **changes: Any
) -> Generator[list[PeerRunner]]:
    """own: settings of each worker; changes: of all. folder: where they meet. Devices compute early: others wait for
    what a worker computes, whose own host does not."""

    def make(rank: int) -> PeerRunner:
        device = FakeDevice(is_late=False)
        shared = {"data_parallel": len(own), "data_rank": rank, "rendezvous": str(folder / "rendezvous")}
        return PeerRunner(rank, load(path, device, **shared | changes | own[rank]), device)

    made = together(make, range(len(own)))
    try:
        yield made
    finally:
        together(lambda of: of.runner.close(), made)


class InlineLoop:
    """A DataParallelLoop of a worker whose other workers are not there: batches are computed when they are submitted,
    in steps of sizes that the others' might have, or after passes of their drafts. While it is idle the worker serves
    some of theirs."""

    def __init__(
        self,
        sockets: PeerSockets,
        peer: Any,
        _on_loss: Any,
        _cores: Any,
        agree: Callable[[list[int]], bool],
        _first: int,
    ) -> None:
        self._sockets, self._peer, self._agree, self._random = sockets, peer, agree, random.Random(1)

    def submit(self, compute: Callable[[], Any], size: int) -> "Future[Any]":
        while self._agree([size, self._other()]):
            self._peer.serve()
        done = Future[Any]()
        done.set_result(compute())
        return done

    def fail(self, error: Exception) -> Exception:
        return error

    def hold(self) -> None:
        pass  # nothing is computed but by its caller

    def check(self) -> None:
        for _ in range(5):
            self._agree([0, self._other()])
            self._peer.serve()

    def close(self) -> None:
        self._peer.leave()
        self._sockets.close()

    def _other(self) -> int:
        """Return the size of a batch of decodes, or of prompts, or of a draft where this worker can take part in it."""
        if self._peer._passes is not None and self._random.random() < 0.3:
            return PassesSize(*self._random.choice([(1, 1, 4), (8, 4, 2), (16, 8, 1)])).number
        rows = self._random.choice([1, 3, 8, 8, 40, 200])
        return StepSize(rows, rows > 8).number


@contextmanager
def lone_peer() -> Generator[dict[str, Any]]:
    """Yield settings of a worker that shares experts, where what is loaded within has nobody to share them with."""
    backend, own = "diptych.workers.execution.common.peer_backend", "diptych.workers.ranks.device_peers"
    with (
        patch(f"{backend}.DataParallelLoop", InlineLoop),
        patch(f"{own}.DevicePeers.join", lambda _: None),
        patch("diptych.workers.execution.model_runner.connect_peers", lambda group, _: PeerSockets(group, {})),
    ):
        yield {"data_parallel": 2, "rendezvous": "nowhere"}
