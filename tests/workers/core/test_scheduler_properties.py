"""For any sequence of events: no step exceeds its budget, every request progresses, every block is accounted for."""

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.workers.common.role import Role
from diptych.workers.core.block_manager import BlockManager
from diptych.workers.core.prefix_cache import PrefixCache
from diptych.workers.core.scheduler import Scheduler
from diptych.workers.core.scheduler_config import LEAST_PREFILL_TOKENS, SchedulerConfig
from diptych.workers.core.sequence import Batch, Sequence
from diptych.workers.costs.step_cost import StepWork

from ...support.sequences import make_sequence

BLOCK = 4
NUM_BLOCKS = 12  # the longest sequence needs 8

Configs = st.builds(
    SchedulerConfig,
    max_batch_tokens=st.integers(1, 24),
    chunk_tokens=st.sampled_from([0, 3, 8]),
    max_running=st.integers(1, 6),
    decode_role_prefill_tokens=st.integers(1, 8),
)
Arrived = tuple[int, int, int, int, int]
# (kind of prompt, its length, tokens to make, tenant, due)
Arrival = st.tuples(st.integers(1, 2), st.integers(1, 24), st.integers(1, 8), st.integers(0, 2), st.integers(0, 5))
Events = st.lists(st.one_of(st.none(), Arrival, st.integers(0, 9)), max_size=40)  # a step, an arrival, an abort


class World:
    def __init__(self, config: SchedulerConfig, role: Role) -> None:
        self.manager = BlockManager(NUM_BLOCKS)
        self.cache = PrefixCache(self.manager, BLOCK)
        self.scheduler = Scheduler(config, self.manager, self.cache)
        self.scheduler.prefill_budget = config.budget_of(role)
        self.config = config
        self.wanted: dict[Sequence, int] = {}

    def arrive(self, arrival: Arrived) -> None:
        token, num_prompt, num_output, tenant, due = arrival
        sequence = make_sequence([token] * num_prompt, max_tokens=num_output, salt=bytes([tenant]))
        sequence.due = float(due)
        self.wanted[sequence] = num_prompt + num_output
        self.scheduler.add(sequence)

    def abort(self, number: int) -> None:
        if number < len(self.wanted):
            sequence = list(self.wanted)[number]
            del self.wanted[sequence]
            self.scheduler.remove(sequence)

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        self.check(batch)
        self.scheduler.copied(batch)
        for entry in batch.entries:
            sequence, samples, before = entry.sequence, entry.samples, entry.sequence.num_computed
            sequence.num_computed += entry.num_new
            self.cache.insert(sequence, before // BLOCK)
            if samples:
                self.yield_tokens(sequence)
                if sequence.num_tokens == self.wanted[sequence]:
                    del self.wanted[sequence]
                    self.scheduler.remove(sequence)
        self.check_books()
        return batch

    def yield_tokens(self, sequence: Sequence) -> None:
        """One token; of one tenant, several at a time."""
        is_forced = sequence.request.cache_salt == bytes([2])
        num = min(1 + sequence.num_tokens % 6 * is_forced, self.wanted[sequence] - sequence.num_tokens)
        sequence.token_ids += [7] * num
        sequence.run_length = num
        if num > 1:
            self.scheduler.forward(sequence)

    def check(self, batch: Batch) -> None:
        assert batch.num_tokens <= self.config.max_batch_tokens
        assert len({e.sequence for e in batch.entries}) == len(batch.entries)
        assert self.scheduler.num_running <= self.config.max_running
        for number, entry in enumerate(batch.entries):
            sequence = entry.sequence
            end = sequence.num_computed + entry.num_new
            assert 1 <= entry.num_new <= sequence.num_uncomputed
            assert end <= len(sequence.block_table) * BLOCK
            assert number >= batch.num_decodes or (sequence.num_uncomputed == 1 and sequence.is_decoding)
            assert sequence.is_decoding or number >= batch.num_decodes + batch.num_runs

    def check_books(self) -> None:
        scheduler = self.scheduler
        assert self.manager.check_integrity(scheduler.tables()) == 0
        self.cache.check_integrity()
        assert set(scheduler.sequences()) == set(self.wanted)
        waiting = [s for s in self.wanted if not s.is_decoding]
        assert scheduler.num_waiting_tokens == sum(s.num_uncomputed for s in waiting)


@settings(max_examples=150, deadline=None)
@given(Configs, st.sampled_from(Role), Events)
def test_budgets_are_kept_and_everybody_ends(config: SchedulerConfig, role: Role, events: list[object]) -> None:
    world = World(config, role)
    for event in events:
        if event is None:
            world.step()
        elif isinstance(event, int):
            world.abort(event)
        else:
            world.arrive(event)  # type: ignore[arg-type]
        world.check_books()
    for _ in range(3000):
        if not world.wanted:
            break
        assert world.step(), "nothing runs, and somebody waits"
    assert not world.wanted
    assert world.manager.num_free == NUM_BLOCKS


@settings(max_examples=40, deadline=None)
@given(st.lists(Arrival, min_size=1, max_size=12), st.floats(0.001, 0.1))
def test_beside_decodes_a_step_stays_near_its_target(arrivals: list[Arrived], target: float) -> None:
    """1 ms a step and 1 ms a token, measured: a step with decodes takes no more than the target, or 16 tokens more."""
    world = World(SchedulerConfig(target_step_s=target), Role.MIXED)
    for number in range(40):
        work = StepWork(number % 5, 40 * (number % 5)).with_chunk(0, number % 7)
        world.scheduler.cost.add(work, 0.001 + 0.001 * (number % 5 + number % 7))
    cost = world.scheduler.cost
    for arrival in arrivals:
        world.arrive(arrival)
        batch = world.scheduler.schedule()
        decodes = batch.entries[: batch.num_decodes]
        work = StepWork(len(decodes), sum(e.sequence.num_tokens for e in decodes))
        for entry in batch.entries[batch.num_decodes :]:
            work = work.with_chunk(entry.sequence.num_computed, entry.num_new)
        if decodes and work.num_prefill > LEAST_PREFILL_TOKENS:
            assert cost.seconds(work) <= target * (1 + 1e-9)
        world.scheduler.copied(batch)
        for entry in batch.entries:
            samples = entry.samples
            entry.sequence.num_computed += entry.num_new
            if samples:
                entry.sequence.token_ids.append(7)
