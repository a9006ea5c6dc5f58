"""Backend of a worker that shares experts with others and computes on a device.

    engine's thread    launch ──> a batch and its size ──> wait ──> a step under way ──> tokens, or the next launch
    loop's thread                  └─ agree with the others on the step ─ launch it ─┘
                       nothing to compute: agree, launch the experts' part of a step of the others

So what is launched is launched by one thread at a time: the loop's has a batch only while the engine's waits for it. A
draft keeps it from the others' steps meanwhile (`hold`), or is a step of its own (`share`).
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ...common.request import SamplingParams
from ...core.runner import InFlightStep, LayerWatch
from ...core.sequence import Batch, IsHere, SampledToken
from ...device.device import Lane
from ...parallel.rendezvous import PeerSockets
from ...ranks.agreed_step import PassesSize, StepSize, agreed, size_of
from ...ranks.data_parallel import READY, DataParallelLoop, meet
from ...ranks.rank_processes import OnLoss
from .backend import Backend
from .draft_turns import DraftTurns, SharedPasses

T = TypeVar("T")


class AgreedSteps(Backend, Protocol):
    """Launches batches in steps of an agreed size."""

    def size_of(self, batch: Batch) -> StepSize: ...

    def launch_agreed(self, batch: Batch, watch: LayerWatch | None, step: StepSize) -> InFlightStep:
        """Launch a batch as part of a step of all workers."""
        ...

    def serve(self, step: StepSize) -> None:
        """Launch a step without a batch of this worker's own: experts for the others' rows."""
        ...

    def leave(self) -> None:
        """Leave the workers that share experts. Idempotent."""
        ...

    @property
    def main(self) -> Lane:
        """The lane that has all steps in order."""
        ...

    def recovering(self) -> AbstractContextManager[None]:
        """Leave the others if the body fails, and raise the error by its name; bound the time for which it waits."""
        ...


class PeerBackend:
    """A Backend, the Peer of its loop, and DraftTurns. Before `begin` nothing is computed: what drafts captures graphs,
    which nothing may be beside."""

    def __init__(
        self, steps: AgreedSteps, peer_sockets: PeerSockets, on_loss: OnLoss, cores: Sequence[int] | None
    ) -> None:
        self.steps, self._peer_sockets = steps, peer_sockets
        self._step: StepSize | PassesSize = StepSize()
        self._passes: SharedPasses | None = None
        self._make_loop = lambda: DataParallelLoop(peer_sockets, self, on_loss, cores, self._agree, READY + 1)
        self._begun: DataParallelLoop | None = None

    @property
    def _loop(self) -> DataParallelLoop:
        assert self._begun is not None
        return self._begun

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> InFlightStep:
        """Raises RankLost."""
        size = self.steps.size_of(batch).number
        return _Ending(self._loop.submit(partial(self._launch, batch, watch), size).result(), self._loop)

    @property
    def has_borrowed_cores(self) -> bool:
        return False

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool:
        return self.steps.takes_input_from_previous(sampling)

    def expert_tokens(self) -> npt.NDArray[np.int64] | None:
        return self.steps.expert_tokens()

    @property
    def turns(self) -> DraftTurns:
        return self

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        with _ending(self._loop):
            self.steps.copy_blocks(pairs)

    def check(self) -> None:
        self._loop.check()
        self.steps.check()

    def close(self) -> None:
        if self._begun is not None:
            self._begun.close()
        if self._passes is not None:  # their graphs hold calls of the others' group
            self._passes.close()
        self.steps.close()

    def begin(self) -> None:
        """See DraftTurns."""
        meet(self._peer_sockets, READY)
        self._begun = self._make_loop()

    def hold(self) -> None:
        """See DraftTurns."""
        self._loop.hold()
        with _ending(self._loop), self.steps.recovering():
            self.steps.main.record().wait()

    def add(self, passes: SharedPasses) -> None:
        """See DraftTurns."""
        self._passes = passes

    def share(self, size: PassesSize, compute: Callable[[PassesSize], T]) -> T:
        """See DraftTurns."""
        return self._loop.submit(partial(self._draft, compute), size.number).result()

    def serve(self) -> None:
        """See Peer."""
        if isinstance(self._step, StepSize):
            self.steps.serve(self._step)
        else:
            self._draft(self._shared_passes.serve)

    def leave(self) -> None:
        """See Peer."""
        self.steps.leave()

    def _agree(self, sizes: Sequence[int]) -> bool:
        self._step = agreed(sizes)
        return type(self._step) is not type(size_of(sizes[0]))

    def _launch(self, batch: Batch, watch: LayerWatch | None) -> InFlightStep:
        assert isinstance(self._step, StepSize)
        return self.steps.launch_agreed(batch, watch, self._step)

    @property
    def _shared_passes(self) -> SharedPasses:
        assert self._passes is not None, "workers drafted with layers of the model, and this one cannot"
        return self._passes

    def _draft(self, compute: Callable[[PassesSize], T]) -> T:
        """Compute passes in the order of steps."""
        assert isinstance(self._step, PassesSize)
        main, lane = self.steps.main, self._shared_passes.lane
        with self.steps.recovering():
            lane.after(main.record())
            computed = compute(self._step)
            main.after(lane.record())
        return computed


class _Ending:
    """A step of all workers: where it fails, they end."""

    def __init__(self, step: InFlightStep, loop: DataParallelLoop) -> None:
        self._launched, self._loop = step, loop

    def sample(self, is_here: IsHere) -> None:
        with _ending(self._loop):
            self._launched.sample(is_here)

    def tokens(self) -> list[SampledToken]:
        with _ending(self._loop):
            return self._launched.tokens()

    def abandon(self) -> None:
        self._launched.abandon()


@contextmanager
def _ending(loop: DataParallelLoop) -> Generator[None]:
    """End this worker if the body fails. Raises RankLost."""
    try:
        yield
    except Exception as e:
        raise loop.fail(e) from e
