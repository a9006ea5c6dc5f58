"""Backend of a worker that shares experts with others and computes on a device.

    engine's thread    launch ──> a batch and its size                                  tokens ──> wait for it
    loop's thread                 └─ agree with the others on the step ─ launch it, wait for its tokens ─┘

It is launched when all know the step, and the next one when this one is over: none is launched ahead.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...common.request import SamplingParams
from ...core.runner import InFlightStep, LayerWatch
from ...core.sequence import Batch, SampledToken
from ...parallel.rendezvous import PeerSockets
from ...ranks.agreed_step import StepSize, agreed
from ...ranks.data_parallel import DataParallelLoop
from ...ranks.rank_processes import OnLoss
from ...ranks.step_executor import Compute, submit_step
from .backend import Backend


class AgreedSteps(Backend, Protocol):
    """Computes batches in steps of an agreed size."""

    def size_of(self, batch: Batch) -> StepSize: ...

    def launch_agreed(self, batch: Batch, watch: LayerWatch | None, step: StepSize) -> InFlightStep:
        """Launch a batch as part of a step of all workers."""
        ...

    def serve(self, step: StepSize) -> None:
        """Compute a step without a batch of this worker's own: experts for the others' rows."""
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
        submit = partial(self._loop.submit, size=self.steps.size_of(batch).number)
        return submit_step(submit, partial(self._prepare, batch), watch)

    @property
    def has_borrowed_cores(self) -> bool:
        return False

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool:
        return False

    def expert_tokens(self) -> npt.NDArray[np.int64] | None:
        return self.steps.expert_tokens()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
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

    def _prepare(self, batch: Batch, watch: LayerWatch | None) -> Compute:
        return partial(self._compute, batch, watch)

    def _compute(self, batch: Batch, watch: LayerWatch | None) -> list[SampledToken]:
        return self.steps.launch_agreed(batch, watch, self._step).tokens()
