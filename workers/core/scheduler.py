"""Picks the sequences of the next step. Knows tokens and blocks, never a tensor, a clock or a socket.

    add ─> waiting ──admitted──> prefilling ──all computed──> decoding ──> remove | detach
              ^                      └──────── preempted ────────┘

One budget a step: running decodes first (one token each, a run or a draft: see decoding.py and drafting.py). Each
admitted prompt that does not end in the step keeps half of what is left, in turn; the rest is for shorter ones that
wait (waiting_queue.py says who is next), and what they leave is its again. It is counted in tokens and, beside decodes,
in seconds, by what steps were measured to cost (step_cost.py). Where steps failed with a sequence before, it is
computed alone (suspects.py). A sequence gets the blocks of all its tokens when it is admitted and more whenever a
decode crosses a block's end; where none is left, the youngest sequence is preempted: its blocks are freed, its tokens
kept, and it is computed again later (recompute, PagedAttention §4.5).

A waiting sequence is not admitted while another computes blocks that it can share (shared_prompts.py), nor beside an
unfinished prompt that has less than twice as much left: one after the other, both would end sooner (parked on it).
"""

import math
from collections.abc import Iterator

from ..common.request import Request
from ..common.role import Role
from ..costs.load_parts import PromptCounts
from ..costs.step_cost import Budget, StepCost, StepWork, late_target_s
from ..kv.layout import blocks_for
from .block_manager import BlockManager
from .decoding import Decoding, StepTargets, work_of
from .draft_kv import DraftKV
from .drafting import Drafter, Drafting, max_drafted
from .prefix_cache import PrefixCache
from .scheduler_config import LEAST_PREFILL_TOKENS, SchedulerConfig
from .sequence import NEVER, Batch, ScheduledSequence, Sequence, SequenceStatus, UnsampledChunk
from .shared_prompts import BlockShortage, SharedPrompts
from .step_ahead import StepAhead, follow
from .suspects import Suspects
from .waiting_queue import WaitingQueue

RECENT = 2.0  # in usual TTFTs: sequences that can be in time come, if one was admitted within that time
MAX_LOOKED_AT = 64  # waiting sequences a step; each may have a long prompt to be looked up
_Entries = list[ScheduledSequence]
_Copies = list[tuple[int, int]]


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        manager: BlockManager,
        cache: PrefixCache,
        drafter: Drafter | None = None,
        draft_kv: DraftKV | None = None,
    ) -> None:
        self.config = config
        self.prefill_budget = config.budget_of(Role.MIXED)  # tokens beside decodes; may change between any two steps
        self.cost = StepCost()
        self.num_preemptions = 0
        self.prompts = PromptCounts()
        self._manager = manager
        self._cache = cache
        self._queue = WaitingQueue()
        self._shared = SharedPrompts(manager, cache, self._queue)
        self._suspects = Suspects()
        # Dicts as ordered sets: O(1) removal. The last to run is the youngest.
        self._running: dict[Sequence, None] = {}
        self._prefilling: dict[Sequence, None] = {}
        self._drafting = Drafting(drafter, manager, cache.block_size, max_drafted(config.max_running), draft_kv)
        self._decoding = Decoding(math.inf if config.tpot_s is None else config.tpot_s)
        self._shortage = BlockShortage(manager, cache)
        self._ahead: StepAhead | None = None  # the step that is being made, if one is under way before it
        self._in_time_at = -math.inf  # when a sequence was admitted last that could be in time

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens not yet computed, of all sequences that do not decode. O(running sequences)."""
        return self._queue.num_tokens + sum(s.num_uncomputed for s in self._prefilling if not s.is_decoding)

    @property
    def num_late_tokens(self) -> int:
        """Number of those whose sequences are late, and let others go first. O(running sequences)."""
        under_way = [s for s in self._prefilling if self._queue.now < s.gives_way_until and not s.is_decoding]
        return self._queue.num_late_tokens + sum([s.num_uncomputed for s in under_way])

    @property
    def has_work(self) -> bool:
        return bool(self._running or len(self._queue))

    def next_unpark(self) -> float:
        """Time, as `now` of `schedule`, at which a parked sequence may run in any case; infinite: there is no such."""
        return self._queue.next_unpark()

    def not_begun(self) -> list[Sequence]:
        """Waiting sequences of which nothing was computed here."""
        return [s for s in self._queue if not self._queue.is_preempted(s)]

    def sequences(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._queue

    def tables(self) -> Iterator[list[int]]:
        """All block tables that hold blocks here."""
        for sequence in self.sequences():
            yield sequence.block_table
        yield self._shared.held_blocks()

    def slack_s(self, num_tokens: int, request: Request) -> float:
        """See StepTargets.slack_s."""
        return self._targets().slack_s(num_tokens, request)

    def _targets(self) -> StepTargets:
        budget = self.prefill_budget
        return StepTargets(self.config, self.cost, self._decoding, budget, lambda: self.num_waiting_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no blocks."""
        assert not sequence.block_table and sequence.num_computed == 0
        self._shared.stopped(sequence)
        sequence.status = SequenceStatus.WAITING
        self._suspects.add(sequence)
        self._queue.enter(sequence)
        self._queue.add(sequence)

    def expect(self, sequence: Sequence) -> None:
        """Note that its prefix is on the way: equal prompts wait until it is here (`add`, `add_running`), or due."""
        self._cache.name(sequence)
        self._shared.computes(sequence)

    def give_up(self, sequence: Sequence) -> None:
        """Forget a sequence that was expected and will not run."""
        self._shared.stopped(sequence)

    def add_running(self, sequence: Sequence) -> None:
        """Take a sequence whose KV arrived with its blocks (the sink side of a hand-off)."""
        assert sequence.num_uncomputed >= 1
        self._suspects.add(sequence)
        self._queue.enter(sequence)
        self._run(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or aborted sequence and release its blocks."""
        self.detach(sequence)
        self._release(sequence)

    def detach(self, sequence: Sequence) -> None:
        """Forget a sequence and leave its blocks with the caller."""
        self._suspects.discard(sequence)
        self._drafting.ended(sequence)
        if self._queue.discard(sequence):
            self._shared.forget(sequence)
        else:
            self._stop(sequence)
        self._queue.leave(sequence)

    def forward(self, sequence: Sequence) -> None:
        """Note that a running sequence has got several tokens at once."""
        self._decoding.forward(sequence)

    def measured(self, batch: Batch, seconds: float, *, borrowed: bool = False) -> None:
        """Note how long the batch took; call it before what was computed is counted. borrowed: see StepCost.add."""
        if self._suspects.sequences:
            self._suspects.computed(batch)
        self._drafting.measured(batch, seconds, borrowed=borrowed)
        takes_longer = batch.prompt_logprobs is not None or batch.drafts  # than its tokens do
        if self.config.target_step_s != 0 and not takes_longer:
            self.cost.add(work_of(batch), seconds, borrowed=borrowed)

    def schedule(self, now: float = 0.0) -> Batch:
        """Make the next step's batch; empty when nothing can run. now: as Sequence.due."""
        self._queue.advance(now)
        self._end_prefills()
        if not self._suspects.sequences:
            return self._together()
        if self._suspects.take_turn():
            return self._alone() or self._together()
        return self._together() or self._alone()

    def _alone(self) -> Batch:
        """Make the next step of a sequence that is computed alone; empty where none of them can run."""
        sequence, budget = self._suspects.first(self._running), Budget(self.config.step_tokens, StepWork())
        entries = [entry for entry in self._schedule_decodes() if entry.sequence is sequence]
        num_decoding, num_runs = len(entries), self._decoding.num_runs(entries)
        copies: list[tuple[int, int]] = []
        if sequence in self._prefilling:
            self._add_chunk(sequence, entries, budget)
        elif sequence is None and self._queue.peek() in self._suspects:
            self._admit(entries, budget, copies, None, late=True)
        return Batch.of(entries, num_decoding - num_runs, copies, num_runs)

    def _together(self) -> Batch:
        """Make a step of all sequences that are not computed alone."""
        entries = self._schedule_decodes()
        if self._suspects.sequences:
            entries = self._suspects.left_out_of(entries)
        max_tokens = self.config.step_tokens - bool(self._prefilling)
        entries, num_runs = self._drafting.extend(entries, self._decoding.num_runs(entries), max_tokens)
        num_decoding, copies = len(entries), list[tuple[int, int]]()
        self._schedule_prompts(entries, self._budget(entries, num_runs), copies)
        return Batch.of(entries, num_decoding - num_runs, copies, num_runs)

    def schedule_ahead(self, under_way: Batch, now: float = 0.0) -> Batch | None:
        """Make the batch after one that is still computed (step_ahead.py), as `schedule` would once that is recorded;
        None where a sequence needs the host first, or memory runs short: then the step waits for the one before it."""
        if self._drafting.drafter is not None:
            return None  # a draft follows the last token
        self._queue.advance(now)
        self._end_prefills()
        ahead = follow(under_way, self._running, self._cache.block_size, self.config.step_tokens - 1)
        if ahead is None or not self._may_follow(ahead):
            return None
        for sequence in ahead.growing:
            sequence.block_table += self._manager.allocate(1)
        entries, copies = list(ahead.decodes), list[tuple[int, int]]()
        if self._prefilling or len(self._queue):
            self._ahead = ahead
            try:
                with ahead.recorded():
                    for sequence in [s for s in ahead.prompts if not s.num_uncomputed]:
                        self._queue.unpark(sequence)
                    self._schedule_prompts(entries, self._budget(entries, ahead.num_runs), copies)
            finally:
                self._ahead = None
        assert entries or not copies
        return ahead.batch(entries, copies) if entries else None

    def _may_follow(self, ahead: StepAhead) -> bool:
        """Return whether this step can be made before the one under way is over."""
        left = {s: s.num_tokens - ahead.prompts.get(s, s.num_computed) for s in self._prefilling}
        num_prompts = sum([num > 0 for num in left.values()])
        if self._suspects.sequences and (num_prompts or ahead.num_came or len(self._queue)):
            return False  # somebody is computed alone
        first = self._queue.peek()
        if any(num == 1 and not s.input_from_previous for s, num in left.items()) or (first and self._is_stuck(first)):
            return False
        num_rows = min(self.config.max_running - num_prompts, self.config.step_tokens - (num_prompts > 0))
        return len(ahead.decodes) <= max(num_rows, 1) and len(ahead.growing) <= self._manager.num_free

    def _is_stuck(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence has, after a copy, nothing to compute that may be in a step ahead."""
        return not sequence.input_from_previous and self._shared.has_tail(sequence)

    @property
    def _has_room(self) -> bool:
        """True where one more sequence may be admitted."""
        return len(self._running) - (self._ahead.num_ending if self._ahead else 0) < self.config.max_running

    def _end_prefills(self) -> None:
        """Move sequences whose prompts are computed to those that decode."""
        for sequence in list(self._prefilling):
            self._shared.computed(sequence)
            if sequence.is_decoding:
                del self._prefilling[sequence]
                self._queue.unpark(sequence)
                self._decoding.add(sequence)

    def _schedule_decodes(self) -> list[ScheduledSequence]:
        decoding, block_size = self._decoding, self._cache.block_size
        num_rows = self.config.max_running - len(self._prefilling)  # those that arrived by hand-off may be more
        num_tokens = self.config.step_tokens - bool(self._prefilling)
        limit = max(min(num_tokens, num_rows), 1)
        if len(decoding) > limit:  # more decode than fit into a step: the first were served
            decoding.rotate(limit)
        for sequence in [s for s in decoding if len(s.token_ids) > len(s.block_table) * block_size and not s.is_held]:
            if sequence in decoding:  # one that grew before us may have preempted us
                self._grow(sequence)
        return decoding.entries(limit, num_tokens)

    def _budget(self, decodes: _Entries, num_runs: int) -> Budget:
        has_prompts = bool(self._prefilling) or (len(self._queue) > 0 and self._has_room)
        return self._targets().budget(decodes, num_runs, has_prompts=has_prompts)

    def _schedule_prompts(self, entries: _Entries, budget: Budget, copies: _Copies) -> None:
        """Add chunks: of prompts that wait, in what those under way leave, then of these, and at last of those that are
        late. A sequence that is computed alone gets nothing beside others: where there is one, nobody keeps a half."""
        num_rows = max(self.config.max_running - len(entries), 0)
        under_way = [s for s in self._prefilling if s.num_uncomputed and s not in self._suspects][:num_rows]
        if self._suspects.sequences:
            for sequence in under_way:
                self._add_chunk(sequence, entries, budget)
            self._admit(entries, budget, copies, None, late=True)
            return
        late = [s for s in under_way if self._queue.now < s.gives_way_until]
        if late:
            under_way = [s for s in under_way if s not in late]
        first = len(entries)
        kept, last = budget.keep(self.cost, under_way, self.config.chunk_tokens, LEAST_PREFILL_TOKENS)
        self._admit(entries, budget, copies, None if last is None else under_way[last], late=False)
        chunks: _Entries = []
        for sequence, num_kept in zip(reversed(under_way), reversed(kept), strict=True):
            budget.num_tokens += num_kept
            self._add_chunk(sequence, chunks, budget)
        entries[first:first] = reversed(chunks)
        if not budget.is_spent:
            self._schedule_late(late, entries, budget, copies)

    def _schedule_late(self, late: list[Sequence], entries: _Entries, budget: Budget, copies: _Copies) -> None:
        """Add chunks of late prompts, those under way first. Where others come that can be in time, the step stays
        short: they begin when it ends."""
        if self.cost.is_measured and self._queue.now < self._in_time_at + RECENT * self.config.ttft_s:
            budget.target_s = min(budget.target_s, late_target_s(self.config.ttft_s, self.cost, budget.work))
        ends = [self._add_chunk(s, entries, budget) == s.num_uncomputed for s in late]
        self._admit(entries, budget, copies, None if all(ends) else late[ends.index(False)], late=True)

    def _admit(self, entries: _Entries, budget: Budget, copies: _Copies, beside: Sequence | None, late: bool) -> None:
        """Admit waiting sequences, beside an unfinished prompt; `late`: those too that let others go first."""
        for _ in range(MAX_LOOKED_AT):
            if budget.is_spent or not self._has_room:
                return
            sequence = self._queue.peek()
            if sequence is None or self._shortage.holds(sequence) or (self._ahead and self._is_stuck(sequence)):
                return
            gives_way_until = self._queue.gives_way_until(sequence)
            if gives_way_until and not late:
                return
            cached = self._cache.match(sequence)
            if self._shared.park(sequence, len(cached), beside):
                continue
            if not self._shared.take_blocks(sequence, cached, copies):
                self._shortage.note(sequence, len(cached))
                return
            self._drafting.admitted(sequence)
            if not self._queue.is_preempted(sequence):
                sequence.num_cached = sequence.num_computed
                self.prompts.add(sequence.num_tokens, sequence.num_computed)
            self._queue.pop(sequence.num_uncomputed)
            sequence.gives_way_until = gives_way_until
            self._in_time_at = self._in_time_at if gives_way_until else self._queue.now
            self._run(sequence)
            self._shared.computes(sequence)
            if sequence not in self._suspects or not entries:
                self._add_chunk(sequence, entries, budget)
            if entries and entries[0].sequence in self._suspects:
                return

    def _add_chunk(self, sequence: Sequence, entries: list[ScheduledSequence], budget: Budget) -> int:
        """Add a chunk of what it lacks, as far as the budget goes. Returns its length, perhaps 0."""
        num_later = self._ahead is not None and not sequence.input_from_previous  # after its last token comes the host
        num_left = min(sequence.num_uncomputed - num_later, self.config.chunk_tokens or sequence.num_uncomputed)
        num_new = budget.take(self.cost, sequence.num_computed, num_left, LEAST_PREFILL_TOKENS)
        if num_new > 0:
            chunk = UnsampledChunk if sequence.request.samples_nothing else ScheduledSequence
            entries.append(chunk(sequence, num_new))
        return num_new

    def copied(self, batch: Batch) -> None:
        """Note that the batch's copies are made, or never will be."""
        self._manager.release([source for source, _ in batch.copies])

    def _grow(self, sequence: Sequence) -> None:
        """Allocate for all its tokens; where blocks are short, preempt a sequence, perhaps this one."""
        num_needed = blocks_for(sequence.num_tokens, self._cache.block_size) - len(sequence.block_table)
        if self._manager.num_free < num_needed:
            self._shared.drop_tails()
        while self._manager.num_free < num_needed:
            victim = self._victim() or sequence
            self._preempt(victim)
            if victim is sequence:
                return
        sequence.block_table += self._manager.allocate(num_needed)

    def _victim(self) -> Sequence | None:
        """The youngest running sequence. A source's blocks are leased: preempting it would free nothing. A provisional
        one is not its own yet: it commits in a moment, or frees them all."""
        return next((s for s in reversed(self._running) if s.handoff_id is None and s.provisional is None), None)

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self._release(sequence)
        sequence.num_computed, sequence.num_exact, sequence.num_draft_computed = 0, NEVER, 0
        sequence.run_length = 1
        sequence.status = SequenceStatus.WAITING
        self._queue.add_preempted(sequence)
        self.num_preemptions += 1

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self._running[sequence] = None
        self._prefilling[sequence] = None

    def _stop(self, sequence: Sequence) -> None:
        """Remove it from those that run; it keeps its blocks."""
        self._shared.stopped(sequence)
        del self._running[sequence]
        self._prefilling.pop(sequence, None)
        self._queue.unpark(sequence)
        self._decoding.discard(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._manager.release(sequence.block_table)
        sequence.block_table = []
