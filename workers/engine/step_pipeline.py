"""Pipeline of steps in flight: one, and perhaps the next, so that the device never waits for the engine.

    launch n ──> finish n: sample n, launch n + 1, wait for n ──> its tokens are accepted
                       ┌───────────────────────────────────────────────────┘
                       └──> finish n + 1: sample n + 1, launch n + 2, wait for n + 1 ──> ...

Step n + 1 is made while n is computed (Scheduler.schedule_ahead), as if no sequence stopped by the token that n yields:
how long each is, and so which ends by its length and which needs a block, is known before the token is. Prompts go on
in it, are admitted to it and are announced to their sinks by it, and a sequence that came with its KV while n is
computed joins it. Where a sequence needs the host between two of its tokens, what is under way is finished first:
lockstep. Where those with grammars do not (Runner.takes_input_from_previous), only their masks need the tokens of the
step before: such a step is sampled once these are accepted, and before the step after it is made (InFlightStep.sample).

A guess has no effect where it was wrong. All books stay as they were before n until n is finished, and those of n + 1
likewise: a row of a sequence that has left meanwhile (a stop token, an abort, a deadline) is dropped here, and the
blocks that it had rest until the step that may still write them is over (BlockManager.begin_step). So nothing is told,
cached or handed off before it is computed, and nobody is preempted for a step that may not be; a block that is only
cached may be taken. A block is copied (to those that share the end of a prompt) beside step n, which reads the copied
tokens at most: they were computed before it. The block that it is copied from rests until n + 1 is over, too.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ..common.errors import OutOfDeviceMemory, StepFailed, StepFailedAlone
from ..common.request import SamplingParams
from ..core.block_manager import BlockManager
from ..core.decoding import note_inexact, work_of
from ..core.runner import InFlightStep, LayerWatch, Runner
from ..core.scheduler import Scheduler
from ..core.sequence import Batch, SampledToken, ScheduledSequence, Sequence
from .load import EngineLoad
from .outgoing import OutgoingHandoffs
from .step_log import StepLog

log = logging.getLogger("diptych.engine")


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    batch: Batch
    launched: InFlightStep
    watch: LayerWatch | None
    began: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A computed step, without the sequences that had left by then: its batch may be empty."""

    batch: Batch
    sampled: list[SampledToken]
    watch: LayerWatch | None  # with which it was launched
    began: float  # by the clock
    seconds: float  # of the step alone


class StepPipeline:
    """True while a step is under way: between two calls of the engine's `step` one may be, within it two."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        manager: BlockManager,
        outgoing: OutgoingHandoffs,
        load: EngineLoad,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._scheduler, self._manager, self._load, self._clock = runner, scheduler, manager, load, clock
        self._outgoing = outgoing
        self._may_be_sparse = runner.info.sparse_budget > 0
        self._runs_ahead = runner.takes_input_from_previous(SamplingParams())
        self._steps: deque[_LaunchedStep] = deque()
        self._deferred: list[Callable[[], object]] = []
        self._last_end = 0.0
        self.log: StepLog | None = None
        self._computing: list[Batch] = []  # that the runner may raise for, newest first

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def first(self) -> Batch | None:
        """Batch of the oldest step under way."""
        return self._steps[0].batch if self._steps else None

    def computes(self, sequence: Sequence) -> bool:
        """Return whether a step under way may write blocks of the sequence. O(entries)."""
        return any(entry.sequence is sequence for step in self._steps for entry in step.batch.entries)

    def launch(self, batch: Batch, tell: Callable[[], object]) -> None:
        """Launch a step while none is under way. tell: see OutgoingHandoffs.begin_step."""
        assert not self._steps
        self._launch(batch, tell)

    def finish(self, here: Mapping[str, Sequence], tell: Callable[[], object]) -> Finished:
        """Launch what may follow the first step, and wait for that. `here`: by key, those that are on this worker.

        Raises what the runner raises; `failed` or `give_up` then.
        """
        under_way, self._computing = self._steps[0].batch, [self._steps[0].batch]
        self._steps[0].launched.sample(lambda sequence: here.get(sequence.key) is sequence)
        self._computing = []
        if self._runs_ahead and (ahead := self._scheduler.schedule_ahead(under_way, self._clock())) is not None:
            self._launch(ahead, tell)
        step = self._steps.popleft()
        self._computing = [step.batch]
        try:
            sampled = step.launched.tokens()
        finally:
            self._manager.end_step()
        self._computing = []
        # A step's own time, without the time of the step before it.
        began, self._last_end = max(step.began, self._last_end), self._clock()
        self._scheduler.measured(step.batch, self._last_end - began, borrowed=self._runner.has_borrowed_cores)
        if self.log is not None:
            self.log.add(began, work_of(step.batch), self._last_end - began)
        batch = step.batch
        if batch.previous_entries:
            batch = _without_those_that_left(batch, here)
            sampled = [token for token in sampled if here.get(token.sequence.key) is token.sequence]
        if self._may_be_sparse:
            note_inexact(batch.entries)
        self._load.count(batch, self._last_end - began)
        return Finished(batch, sampled, step.watch, began, self._last_end - began)

    def abandon(self) -> None:
        """Drop all steps that were launched, because one failed."""
        for step in self._steps:
            step.launched.abandon()
            self._manager.end_step()
        while self._steps:
            self._outgoing.undo_step(self._steps.pop().watch)

    def failed(self, error: Exception, here: Mapping[str, Sequence]) -> dict[Sequence, StepFailed]:
        """Find the sequences to end because a step raised. What the others hold was computed before, and is valid.
        A step that cannot be launched ahead may not be the cause, but the one before it: those of both end. Where it
        was not the runner that raised, the cause is unknown, and all end."""
        self._load.num_failed_steps += 1
        batches, self._computing = self._computing, []
        self.abandon()
        ended = list(dict.fromkeys(s for batch in batches for s in self._affected(batch.entries, batch, here)))
        if not batches:
            ended = list(self._scheduler.sequences())
        computed = {entry.sequence for batch in batches for entry in batch.entries}
        is_alone = len(ended) == 1 and computed == set(ended)
        why = f"a step failed ({type(error).__name__}: {error}); the worker's log has the traceback"
        kind = StepFailedAlone if is_alone else StepFailed
        drafted = {e.sequence: len(e.draft) for batch in batches for e in batch.drafts}
        return {s: kind(why, num_output=s.num_output + drafted.get(s, 0)) for s in ended}

    def _affected(
        self, entries: Iterable[ScheduledSequence], batch: Batch, here: Mapping[str, Sequence]
    ) -> list[Sequence]:
        """Sequences of `entries` that are here, and those with a block that was to be copied for the batch."""
        targets = {target for _, target in batch.copies}  # its content is unknown
        ended = {e.sequence: None for e in entries}
        ended |= {s: None for s in self._scheduler.sequences() if not targets.isdisjoint(s.block_table)}
        return [s for s in ended if here.get(s.key) is s]

    def give_up(self, error: OutOfDeviceMemory, here: Mapping[str, Sequence]) -> list[Sequence]:
        """Find the sequences to end because a step had no memory. All books are as they were before it.

        Its prompts are, and who is announced to a sink while it runs; where it has neither, all that it has. The others
        compute their tokens again, in a smaller step.
        """
        log.warning("%s", error)
        batch, self._computing = self._computing[0], []
        self.abandon()
        num_decoding = batch.num_decodes + batch.num_runs
        prompts, decodes = batch.entries[num_decoding:], batch.entries[:num_decoding]
        announced = [e for e in decodes if e.sequence.handoff_id is not None]
        return self._affected([*prompts, *announced], batch, here) or self._affected(batch.entries, batch, here)

    def check_runner(self) -> None:
        """Check the ranks while there is nothing to compute. Raises RankLost where one is lost."""
        self._runner.check()

    def defer(self, command: Callable[[], object]) -> None:
        """Run `command` when the steps under way have been accepted."""
        self._deferred.append(command)

    def run_deferred(self) -> None:
        commands, self._deferred = self._deferred, []
        for command in commands:
            command()

    def _launch(self, batch: Batch, tell: Callable[[], object]) -> None:
        began, watch = self._clock(), self._outgoing.begin_step(batch, tell)
        self._computing = [batch, *(step.batch for step in self._steps)]
        try:
            if batch.copies:
                self._runner.copy_blocks(batch.copies)
            launched = self._runner.launch(batch, watch)
            self._manager.begin_step()
            self._steps.append(_LaunchedStep(batch, launched, watch, began))
        except Exception:
            self._outgoing.undo_step(watch)
            raise
        finally:
            if batch.copies:
                self._scheduler.copied(batch)


def _without_those_that_left(batch: Batch, here: Mapping[str, Sequence]) -> Batch:
    """Return a batch that was launched ahead, without the sequences that left meanwhile."""

    def stays(sequence: Sequence) -> bool:
        return here.get(sequence.key) is sequence

    num_decoding = batch.num_decodes + batch.num_runs
    decodes = [e for e in batch.entries[: batch.num_decodes] if stays(e.sequence)]
    runs = [e for e in batch.entries[batch.num_decodes : num_decoding] if stays(e.sequence)]
    prompts = [e for e in batch.entries[num_decoding:] if stays(e.sequence)]
    scored, pooled = batch.prompt_logprobs, batch.pooled
    return replace(
        batch,
        entries=[*decodes, *runs, *prompts],
        num_decodes=len(decodes),
        num_runs=len(runs),
        prompt_logprobs=scored and [of for of in scored if stays(of[0])],
        pooled=pooled and [of for of in pooled if stays(of[0])],
    )
