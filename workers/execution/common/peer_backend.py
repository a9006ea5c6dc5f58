"""Backend of a worker that shares experts with others and computes on a device.

    engine's thread    launch ──> a batch and its size ──> wait ──> a step under way ──> tokens, or the next launch
    loop's thread                  └─ agree with the others on the step ─ launch it ─┘
                       nothing to compute: agree, launch the experts' part of a step of the others

So what is launched is launched by one thread at a time: the loop's has a batch only while the engine's waits for it.
"""

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...common.request import SamplingParams
from ...core.runner import InFlightStep, LayerWatch
from ...core.sequence import Batch, IsHere, SampledToken
from ...parallel.rendezvous import PeerSockets
from ...ranks.agreed_step import StepSize, agreed
from ...ranks.data_parallel import DataParallelLoop
from ...ranks.rank_processes import OnLoss
from .backend import Backend


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


class PeerBackend:
    """A Backend, and the Peer of its loop."""

    def __init__(
        self, steps: AgreedSteps, peer_sockets: PeerSockets, on_loss: OnLoss, cores: Sequence[int] | None
    ) -> None:
        self.steps, self._step = steps, StepSize()
        self._loop = DataParallelLoop(peer_sockets, self, on_loss, cores, self._agree)

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

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        with _ending(self._loop):
            self.steps.copy_blocks(pairs)

    def check(self) -> None:
        self._loop.check()
        self.steps.check()

    def close(self) -> None:
        self._loop.close()
        self.steps.close()

    def serve(self) -> None:
        """See Peer."""
        self.steps.serve(self._step)

    def leave(self) -> None:
        """See Peer."""
        self.steps.leave()

    def _agree(self, sizes: Collection[int]) -> None:
        self._step = agreed(sizes)

    def _launch(self, batch: Batch, watch: LayerWatch | None) -> InFlightStep:
        return self.steps.launch_agreed(batch, watch, self._step)


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
