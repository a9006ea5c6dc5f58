"""Steps that were launched and are not over: one, and perhaps the next, so that what computes never waits for us.

    launch n ──> finish n: launch n + 1, wait for n ──> its tokens are accepted
                       ┌─────────────────────────────────────────┘
                       └──> finish n + 1: launch n + 2, wait for n + 1 ──> ...

Step n + 1 is made while n is computed, as if no sequence stopped by the token that n yields: how long each is, and so
which ends by its length and which needs a block, is known before the token is. Only a step that does nothing but decode
on is launched so (Scheduler.schedule_ahead); before any other, what is under way is finished: lockstep.

A guess has no effect where it was wrong. All books stay as they were before n until n is finished, and those of n + 1
likewise: a row of a sequence that has left meanwhile (a stop token, an abort, a deadline) is dropped here, and the
blocks that it had rest until the step that may still write them is over (BlockManager.begin_step). So nothing is told,
cached or handed off before it is computed, and nobody is preempted for a step that may not be; a block that is only
cached may be taken.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .block_manager import BlockManager
from .engine_load import EngineLoad
from .errors import OutOfDeviceMemory
from .runner import Launched, LayerWatch, Runner
from .scheduler import Scheduler
from .sequence import Batch, SampledToken, Sequence

log = logging.getLogger("diptych.engine")


@dataclass(frozen=True, slots=True)
class _UnderWay:
    batch: Batch
    launched: Launched
    began: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that was computed, less what had left by then: its batch may be empty."""

    batch: Batch
    sampled: list[SampledToken]
    began: float  # by the clock


class LaunchedSteps:
    """Truth says whether a step is under way: between two calls of the engine's `step` one may be, within it two."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        manager: BlockManager,
        load: EngineLoad,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._scheduler, self._manager, self._load, self._clock = runner, scheduler, manager, load, clock
        self._steps: deque[_UnderWay] = deque()
        self._deferred: list[Callable[[], object]] = []
        self._last_end = 0.0

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def first(self) -> Batch | None:
        """What is computed now."""
        return self._steps[0].batch if self._steps else None

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> None:
        """Nothing is under way."""
        assert not self._steps
        began = self._clock()
        try:
            if batch.copies:
                self._runner.copy_blocks(batch.copies)
        finally:
            self._scheduler.copied(batch)
        self._launch(batch, watch, began)

    def finish(self, here: Mapping[str, Sequence]) -> Finished:
        """Launch what may follow the first step, and wait for that. `here`: by key, those that are on this worker.

        Raises what the runner raises; `abandon` then.
        """
        ahead = self._scheduler.schedule_ahead(self._steps[0].batch)
        if ahead is not None:
            self._launch(ahead, None, self._clock())
        step = self._steps.popleft()
        try:
            sampled = step.launched.tokens()
        finally:
            self._manager.end_step()
        # A step's time is its own: what the one before it took is not in it.
        began, self._last_end = max(step.began, self._last_end), self._clock()
        self._scheduler.measured(step.batch, self._last_end - began)
        batch = step.batch
        if batch.fed_by:
            entries = [e for e in batch.entries if here.get(e.sequence.key) is e.sequence]
            batch = replace(batch, entries=entries, num_decodes=len(entries))
            sampled = [token for token in sampled if here.get(token.sequence.key) is token.sequence]
        self._load.count(batch, self._last_end - began)
        return Finished(batch, sampled, began)

    def abandon(self) -> None:
        """A step failed: what was launched after it comes to nothing."""
        while self._steps:
            self._steps.popleft().launched.abandon()
            self._manager.end_step()

    def give_up(self, batch: Batch, error: OutOfDeviceMemory, here: Mapping[str, Sequence]) -> list[Sequence]:
        """A step could not be computed, and all books are as they were before it: the sequences to be ended by that.

        Its prompts are, and who is announced to a sink while it runs; where it has neither, all that it has. The others
        compute their tokens again, in a smaller step.
        """
        log.warning("%s", error)
        self.abandon()
        ended = {e.sequence: None for e in batch.entries[batch.num_decodes :]}
        ended |= {e.sequence: None for e in batch.entries if e.sequence.handoff_id is not None}
        targets = {target for _, target in batch.copies}  # nobody knows what is there
        ended |= {s: None for s in self._scheduler.sequences() if not targets.isdisjoint(s.block_table)}
        return [s for s in ended or [e.sequence for e in batch.entries] if here.get(s.key) is s]

    def check_runner(self) -> None:
        """There is nothing to compute. Raises RankLost where nothing could be."""
        self._runner.check()

    def defer(self, command: Callable[[], object]) -> None:
        """To be run when what is under way has been accepted."""
        self._deferred.append(command)

    def run_deferred(self) -> None:
        commands, self._deferred = self._deferred, []
        for command in commands:
            command()

    def _launch(self, batch: Batch, watch: LayerWatch | None, began: float) -> None:
        launched = self._runner.launch(batch, watch)
        self._manager.begin_step()
        self._steps.append(_UnderWay(batch, launched, began))
