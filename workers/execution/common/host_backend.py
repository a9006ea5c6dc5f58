"""Backend whose steps the host computes: when they are waited for, or at once on a thread of their own.

Steps are prepared (HostSteps.prepare) on the engine's thread, then computed by the waiting thread or by an executor.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...common.errors import RankLost
from ...common.request import SamplingParams
from ...core.runner import InFlightStep, LayerWatch
from ...core.sequence import Batch, SampledToken
from ...device.kv_cache import KVCache
from ...ranks.rank_processes import RankProcesses
from ...ranks.step_executor import Compute, DeferredStep, StepExecutor, submit_step
from ...sampling.sampler import is_plain


class HostSteps(Protocol):
    """Prepares batches that the host computes."""

    @property
    def expert_tokens(self) -> Tensor | None:
        """See layers/moe.py's no_expert_tokens."""
        ...

    def prepare(self, batch: Batch, watch: LayerWatch | None) -> Compute:
        """Return the function that computes the batch, see Runner.launch. That function may raise RankLost."""
        ...


class CoreLender(Protocol):
    """Lends the cores that compute to other workers, and borrows theirs."""

    @property
    def has_borrowed(self) -> bool:
        """Return whether the last step was computed on borrowed cores, too."""
        ...

    def rest(self) -> None:
        """Lend them until the next step. Idempotent."""
        ...

    def close(self) -> None: ...


class HostBackend:
    """A Backend."""

    def __init__(
        self,
        steps: HostSteps,
        cache: KVCache,
        ranks: RankProcesses | None = None,
        executor: StepExecutor | None = None,
        sharing: CoreLender | None = None,
    ) -> None:
        """executor: computes every step; None: whoever waits for a step computes it. An executor that runs ahead needs
        steps that can prepare two batches. sharing: of the cores that compute."""
        self.steps, self._cache, self._ranks, self._executor = steps, cache, ranks, executor
        self._sharing = sharing

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> InFlightStep:
        executor = self._executor
        if executor is None:
            return DeferredStep(self._prepare(batch, watch))
        return submit_step(executor, partial(self._prepare, batch), watch)

    @property
    def has_borrowed_cores(self) -> bool:
        return self._sharing is not None and self._sharing.has_borrowed

    @property
    def turns(self) -> None:
        return None

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool:
        return self._executor is not None and self._executor.runs_ahead and is_plain(sampling)

    def expert_tokens(self) -> npt.NDArray[np.int64] | None:
        counts = self.steps.expert_tokens
        return None if counts is None else counts.numpy()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._cache.copy_blocks(pairs)

    def check(self) -> None:
        if self._executor is not None:
            self._executor.check()
        if self._sharing is not None:
            self._sharing.rest()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
        if self._sharing is not None:
            self._sharing.close()
        if self._ranks is not None:
            self._ranks.close()

    def _prepare(self, batch: Batch, watch: LayerWatch | None) -> Compute:
        return partial(self.compute, self.steps.prepare(batch, watch))

    @torch.inference_mode()
    def compute(self, compute: Compute) -> list[SampledToken]:
        """Run what `prepare` returned. If it fails, all ranks end."""
        try:
            return compute()
        except Exception as e:
            if self._ranks is None:
                raise
            # The other ranks wait in the middle of this step: they would mistake the next step for the rest of it.
            error = e if isinstance(e, RankLost) else RankLost(f"rank 0 failed in a step ({e})")
            raise self._ranks.fail(error) from e
