"""One worker on a virtual clock: the production scheduler, block manager and prefix cache; a StepTimer for a model.
What it does, the engine does (workers/engine): this file repeats the order of its calls.

    idle ──wake──> step ──end──> step ... ──nothing to run──> idle

Steps that only decode the same sequences are one event: the run ends where a sequence does, or blocks run short, and is
cut to the step under way by whatever comes in between.
Of a hand-off the source calls `offered` after each step with new tokens, and `sealed` once it has made the first token;
`end_lease` frees its blocks. The sink calls `imported` when the KV is there.
"""

from typing import Protocol

from ...proto import worker_pb2
from ...workers.common.role import Role
from ...workers.core.block_manager import BlockManager
from ...workers.core.decoding import work_of
from ...workers.core.live_handoff import headroom_blocks
from ...workers.core.prefix_cache import PrefixCache
from ...workers.core.scheduler import Scheduler
from ...workers.core.sequence import Batch, DraftEntry, Sequence, SequenceStatus
from ...workers.costs.load_parts import PrefillShare, step_cost_message
from ...workers.costs.step_cost import StepWork
from ...workers.kv.layout import blocks_for
from .noise import HOLD_S
from .speculation import SimulatedSpeculation
from .timing import DecodeRun
from .transfers import Import
from .worker_setup import WorkerSetup, report_of

LEAST_SHARE = 0.001  # of the time, for prompts: below it a report says the same as before


class WorkerListener(Protocol):
    """Is told what happens on a worker, at the present time."""

    def step_begins(self, worker: "SimulatedWorker", ends: float) -> None:
        """Call `worker.step_ends(worker.step_number)` at that time."""
        ...

    def first_token(self, worker: "SimulatedWorker", sequence: Sequence) -> None: ...

    def finished(self, worker: "SimulatedWorker", sequence: Sequence) -> None: ...

    def offered(self, worker: "SimulatedWorker", sequence: Sequence, began: float) -> None:
        """A step that began then has computed more tokens of a sequence that is handed off."""
        ...

    def sealed(self, worker: "SimulatedWorker", sequence: Sequence) -> None: ...


class SimulatedWorker:
    def __init__(self, name: str, setup: WorkerSetup, role: Role, listener: WorkerListener, now: float = 0.0) -> None:
        self.name = name
        self.setup = setup
        self.born = now
        self.step_number = 0  # of the event that ends the present step, or run of steps
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.prefill_s = 0.0
        self.manager = BlockManager(setup.num_blocks)
        self.cache = PrefixCache(self.manager, setup.block_size, enabled=setup.prefix_cache)
        self.drafts = SimulatedSpeculation(setup.speculation, setup.timer) if setup.speculation else None
        self.scheduler = Scheduler(setup.scheduler, self.manager, self.cache, self.drafts)
        self.scheduler.cost = setup.cost
        self._cost_message = step_cost_message(setup.cost)  # it does not change
        self.scheduler.prefill_budget = setup.scheduler.budget_of(role)
        self.listener = listener
        self._timer = setup.timer
        self.neighbours: list[SimulatedWorker] = []  # on its machine
        self._random = setup.noise.source(name) if setup.noise else None
        self._computes, self._step_s = False, 0.0  # seconds of a step, without those of drafts
        self._slowdown = 1.0  # of the step under way
        self._batch: Batch | None = None
        self._work = StepWork()
        self._run = DecodeRun(0.0, 1, 0.0, 0.0)
        self._inbox: list[tuple[Sequence, float]] = []  # sent here during the step under way, with the time
        self._promised: dict[Sequence, Import] = {}  # imports whose source has not begun
        self._waiting: dict[Sequence, Import] = {}  # imports without blocks
        self._arriving: dict[Sequence, Import] = {}
        self._leased: dict[Sequence, list[int]] = {}
        self._share = PrefillShare(now)
        self._reported = -1

    @property
    def computes(self) -> bool:
        return self._computes

    @property
    def is_empty(self) -> bool:
        """Return whether it holds no request, and nothing for another worker."""
        coming = self._promised or self._waiting or self._arriving
        return not (coming or self.scheduler.has_work or self._inbox or self._leased)

    def submit(self, sequence: Sequence, now: float) -> None:
        """Take a sequence once the step under way has ended."""
        self._inbox.append((sequence, now))
        if self._batch is None:
            self._take()
        self.wake(now)

    def _take(self) -> None:
        for sequence, came_at in self._inbox:
            sequence.due = came_at + self.scheduler.slack_s(sequence.num_prompt, sequence.request)
            self.scheduler.add(sequence)
        self._inbox.clear()

    def expect(self, coming: Import, now: float) -> None:
        """Wait for KV of a sequence: for blocks at once where it is a cached prefix, else from `source_begins` on."""
        self._promised[coming.sequence] = coming
        coming.sequence.status = SequenceStatus.IMPORTING
        if coming.is_prefix:
            self.scheduler.expect(coming.sequence)
            self.source_begins(coming.sequence, now)

    def source_begins(self, sequence: Sequence, now: float) -> None:
        """Reserve blocks for a sequence of which its source has computed something. Idempotent."""
        if sequence in self._promised:
            self._waiting[sequence] = self._promised.pop(sequence)
            self._cut(now)
            self.grant()

    def grant(self) -> None:
        """Reserve blocks for waiting imports, oldest first, as workers/engine/incoming.py does."""
        for sequence, coming in list(self._waiting.items()):
            held = self.cache.match(sequence)
            self.manager.share(held)
            num_needed = blocks_for(max(coming.num_tokens, sequence.num_tokens), self.cache.block_size) - len(held)
            headroom = headroom_blocks(self.scheduler.num_running, self.manager.num_blocks)
            if num_needed + headroom > self.manager.num_free:
                self.manager.release(held)
                return
            del self._waiting[sequence]
            self._arriving[sequence] = coming
            coming.num_held = len(held) * self.cache.block_size
            sequence.block_table = held + self.manager.allocate(num_needed)
            coming.granted(coming.num_held)

    def imported(self, sequence: Sequence, now: float) -> None:
        """Run a sequence whose KV is here: all of it, or a prefix."""
        coming = self._arriving.pop(sequence)
        if coming.is_prefix:
            sequence.num_computed = sequence.num_cached = min(
                max(coming.num_tokens, coming.num_held), sequence.max_cached
            )
            self.scheduler.prompts.add(sequence.num_tokens, coming.num_held)
        else:
            sequence.token_ids.append(0)  # the source's
            sequence.num_resumed = 1
            sequence.num_computed = sequence.num_prompt
        self.scheduler.add_running(sequence)
        self.cache.insert(sequence, 0)
        self.wake(now)

    def end_lease(self, sequence: Sequence, now: float) -> None:
        """Free the blocks of a sequence that was handed off."""
        self._cut(now)  # blocks that come free may end a wait
        self.manager.end_lease(self._leased.pop(sequence))
        if self._waiting:
            self.grant()
        if self._batch is None:
            self.wake(now)

    def set_prefill_budget(self, num_tokens: int, now: float) -> None:
        self.scheduler.prefill_budget = num_tokens
        self._cut(now)

    def wake(self, now: float) -> None:
        """Begin a step, if there is none; else let the one under way end, and then look who has come."""
        if self._batch is None:
            self._begin(now)
        else:
            self._cut(now)

    def step_ends(self, number: int, now: float) -> None:
        """Handle the end of a step or run; a number that is no longer `step_number` was cut."""
        if number == self.step_number:
            self._complete(self._run.num_steps, now)
            self._take()
            self._begin(now)

    def _begin(self, now: float) -> None:
        batch = self.scheduler.schedule(now)
        if batch:
            self.scheduler.copied(batch)
            self._batch, self._work = batch, work_of(batch)
            self._slowdown = self._slowdown_now()
            self._run = self._run_of(batch, now).slowed(self._slowdown)
            if self.drafts is not None:
                self._draft(self.drafts, batch)
            self.manager.begin_step()
            self._announce()
        else:
            self._batch = None
        if self._computes != bool(batch):
            self._computes = bool(batch)
            for neighbour in self.neighbours:
                neighbour.disturbed(now)

    def _draft(self, drafts: SimulatedSpeculation, batch: Batch) -> None:
        """Let a model's passes, and its own prompts, take their time; a pass is no part of the step."""
        drafts.settle(batch)
        step_s = self._run.first_s + drafts.seconds_beside(self._work) * self._slowdown
        self._run = DecodeRun(self._run.began, 1, step_s + drafts.take_pass_s() * self._slowdown, 0.0)
        self._step_s = step_s

    def _run_of(self, batch: Batch, now: float) -> DecodeRun:
        num_steps = self._num_alike(batch)
        if self.setup.noise is None or self._random is None:
            return DecodeRun.of(self._timer, self._work, num_steps, now)
        num_steps = min(num_steps, max(int(HOLD_S / self._timer.seconds(self._work)), 1))
        run = DecodeRun.of(self._timer, self._work, num_steps, now)
        return run.slowed(self.setup.noise.draw(self._random))

    def disturbed(self, now: float) -> None:
        """Let the rest of the step under way take as long as it does beside the neighbours that compute now."""
        slowdown = self._slowdown_now()
        if self._batch is None or slowdown == self._slowdown:
            return
        self._cut(now)
        began, rest_s = self._run.began, self._run.end_of(1) - now
        self._run = DecodeRun(began, 1, now - began + rest_s * slowdown / self._slowdown, 0.0)
        self._slowdown = slowdown
        self._announce()

    def _slowdown_now(self) -> float:
        if any(neighbour.computes for neighbour in self.neighbours):
            return 1.0 + self.setup.contention
        return 1.0

    def _announce(self) -> None:
        self.step_number += 1
        self.listener.step_begins(self, self._run.end_of(self._run.num_steps))

    def _num_alike(self, batch: Batch) -> int:
        """Number of steps, this one included, in which the same sequences decode and nothing else happens."""
        is_alone = batch.num_decodes == len(batch.entries) == self.scheduler.num_running
        if not is_alone or self._waiting or self.drafts is not None:
            return 1
        sequences = [entry.sequence for entry in batch.entries]
        num_steps = min([s.end - len(s.token_ids) for s in sequences])
        size, num_free = self.cache.block_size, self.manager.num_free
        while num_steps > 1:
            ahead = num_steps - 1
            growth = sum([-(-(len(s.token_ids) + ahead) // size) - len(s.block_table) for s in sequences])
            if growth <= num_free:
                return num_steps
            num_steps //= 2
        return num_steps

    def _cut(self, now: float) -> None:
        """Count the steps of a run that are over, and let the run end with the one under way."""
        run = self._run
        if self._batch is None or run.num_steps == 1:
            return
        num_over = run.num_over(now)
        rest_s = run.first_s + run.slope_s * num_over
        began = run.end_of(num_over)
        if num_over:
            self._grow(num_over)
            self._count(num_over, began, self._batch)
            size = len(self._batch.entries)
            self._work = StepWork(size, self._work.num_context + size * num_over)
        for entry in self._batch.entries:  # as the step under way found it
            self._cover(entry.sequence)
        self._run = DecodeRun(began, 1, rest_s, 0.0)
        self._announce()

    def _complete(self, num_steps: int, now: float) -> None:
        batch = self._batch
        assert batch is not None
        self.manager.end_step()
        if num_steps > 1:  # the last of them ends below, like any step
            self._grow(num_steps - 1)
        began = self._run.end_of(num_steps - 1)
        if self.drafts is not None:
            self.scheduler.measured(batch, self._step_s)
        self._count(num_steps, now, batch)
        self._batch = None
        if batch.num_decodes == len(batch.entries):
            self._accept_decodes([entry.sequence for entry in batch.entries])
        else:
            self._accept(batch, began)
        if self._waiting:
            self.grant()

    def _grow(self, num_steps: int) -> None:
        """Give each decode so many tokens, of steps after which none of them ends."""
        assert self._batch is not None
        tokens, size = [0] * num_steps, self.cache.block_size
        for entry in self._batch.entries:
            sequence = entry.sequence
            sequence.token_ids += tokens
            before = sequence.num_computed
            sequence.num_computed = before + num_steps
            if len(sequence.token_ids) > len(sequence.block_table) * size:
                self._cover(sequence)
            if self.cache.enabled and sequence.num_computed // size != before // size:
                self.cache.insert(sequence, before // size)

    def _cover(self, sequence: Sequence) -> None:
        missing = blocks_for(len(sequence.token_ids), self.cache.block_size) - len(sequence.block_table)
        if missing > 0:
            sequence.block_table += self.manager.allocate(missing)

    def _count(self, num_steps: int, now: float, batch: Batch) -> None:
        """Count steps that end now."""
        seconds, num_prefill, num_decodes = now - self._run.began, self._work.num_prefill, self._work.num_decodes
        for entry in batch.drafts:  # what was drafted is a chunk of the work
            num_prefill, num_decodes = num_prefill - len(entry.draft), num_decodes + entry.num_accepted
        self.busy_s += seconds
        self.num_steps += num_steps
        self.num_decode_tokens += num_decodes * num_steps
        if num_prefill:
            self.num_prefill_tokens += num_prefill
            self.prefill_s += seconds * num_prefill / (num_decodes + num_prefill)
            self._share.add(self.setup.cost, self._work, seconds, num_prefill)

    def _accept_decodes(self, sequences: list[Sequence]) -> None:
        size = self.cache.block_size
        for sequence in sequences:
            before = sequence.num_computed
            sequence.num_computed = before + 1
            if self.cache.enabled and (before + 1) % size == 0:
                self.cache.insert(sequence, before // size)
            sequence.token_ids.append(0)
            if len(sequence.token_ids) >= sequence.end:
                self._finish(sequence)

    def _accept(self, batch: Batch, began: float) -> None:
        size = self.cache.block_size
        samples = [entry.samples for entry in batch.entries]
        for entry in batch.entries:
            sequence = entry.sequence
            before = sequence.num_computed
            sequence.num_computed = before + (len(entry.yielded) if isinstance(entry, DraftEntry) else entry.num_new)
            if isinstance(entry, DraftEntry):
                sequence.token_ids += entry.yielded[1:]
            if self.cache.enabled and sequence.num_computed // size != before // size:
                self.cache.insert(sequence, before // size)
        for entry, is_sampled in zip(batch.entries, samples, strict=True):
            sequence = entry.sequence
            if sequence.handoff_id is not None:
                self.listener.offered(self, sequence, began)
            if not is_sampled:
                continue
            is_first = sequence.num_output == 0
            sequence.token_ids.append(0)
            if is_first:
                self.listener.first_token(self, sequence)
            if len(sequence.token_ids) >= sequence.end:
                self._finish(sequence)
            elif sequence.handoff_id is not None:
                self._seal(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.FINISHED
        self.scheduler.remove(sequence)
        self.listener.finished(self, sequence)

    def _seal(self, sequence: Sequence) -> None:
        self.scheduler.detach(sequence)
        sequence.status = SequenceStatus.HANDED_OFF
        self.manager.lease(sequence.block_table)
        self.manager.release(sequence.block_table)
        self._leased[sequence] = sequence.block_table
        self.listener.sealed(self, sequence)

    def must_report(self) -> bool:
        """Return whether its report may differ from the last one; call once for each look."""
        is_changed = self.step_number != self._reported or self._share.value > LEAST_SHARE or bool(self._waiting)
        self._reported = self.step_number
        return is_changed

    def load_report(self, now: float) -> worker_pb2.LoadReport:
        """The report that workers/engine/load.py makes. Steps of a run count when it ends or is cut."""
        report = report_of(self.scheduler, self.manager, self._cost_message)
        report.num_waiting += len(self._waiting)
        report.num_prefill_tokens, report.num_decode_tokens = self.num_prefill_tokens, self.num_decode_tokens
        report.prefill_s = self.prefill_s
        report.prefill_share = self._share.at(now)
        return report

    def check_integrity(self) -> int:
        """Number of blocks whose references are wrong; see BlockManager.check_integrity."""
        self.cache.check_integrity()
        return self.manager.check_integrity([*self.scheduler.tables(), *(s.block_table for s in self._arriving)])
