"""What is announced when, while a step runs: FakeRunners of several layers, every segment written out by hand."""

from collections.abc import Callable

import pytest

from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.handoff.types import HandoffEnded, HandoffRefused, HandoffSealed, SegmentReady
from diptych.workers.testing.fake_runner import FakeRunner, fake_output
from diptych.workers.testing.fake_stream import FakeStep

from ...support.sequences import make_request

HANDOFF = "handoff-1"
BLOCK = 4  # tokens


class Watched(FakeRunner):
    """Records the stored layers; fails once after `fails_after` layers."""

    def __init__(self, fails_after: int | None = None, num_layers: int = 3) -> None:
        super().__init__(num_blocks=64, block_size=BLOCK, num_layers=num_layers)
        self.log: list[object] = []
        self._fails_after = fails_after

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        self.log.append("step")
        return super()._compute(step)

    def _store(self, step: FakeStep, layer: int) -> None:
        if layer == self._fails_after:
            self._fails_after = None
            raise RuntimeError("the device is gone")
        super()._store(step, layer)
        self.log.append(layer)


def make(runner: FakeRunner, layer_groups: int, clock: Callable[[], float] = lambda: 0.0, **config: int) -> Engine:
    return Engine(runner, SchedulerConfig(**config), layer_groups=layer_groups, clock=clock)


def segments(output: StepOutput) -> list[tuple[int, int, int, int]]:
    """(first block, blocks, first layer, layers) of each."""
    found = [e.segment for e in output.handoffs if isinstance(e, SegmentReady)]
    return [(s.first_block, len(s.block_ids), s.first_layer, s.num_layers) for s in found]


def assert_clean(engine: Engine) -> None:
    state = engine.check_integrity()
    assert (state.num_unaccounted_blocks, state.num_open_handoffs) == (0, 0)
    assert state.load.num_free_blocks == state.load.num_blocks


@pytest.mark.parametrize(
    ("num_groups", "expected"),
    [(1, [(0, 3)]), (2, [(0, 1), (1, 2)]), (3, [(0, 1), (1, 1), (2, 1)]), (9, [(0, 1), (1, 1), (2, 1)])],
)
def test_a_prompt_goes_in_groups_of_layers(num_groups: int, expected: list[tuple[int, int]]) -> None:
    engine = make(Watched(), num_groups)
    engine.submit("0/1", make_request(list(range(1, 11)), 5), [], handoff_id=HANDOFF)
    output = engine.step()
    assert segments(output) == [(0, 3, first, num) for first, num in expected]
    assert isinstance(output.handoffs[-1], HandoffSealed)
    engine.end_lease(HANDOFF)
    assert_clean(engine)


def test_each_group_goes_out_before_the_next_is_computed() -> None:
    runner = Watched()
    engine = make(runner, 3)
    engine.submit("0/1", make_request(list(range(1, 11)), 5), [], handoff_id=HANDOFF)
    engine.step(lambda early: runner.log.extend(segments(early)))
    assert runner.log == ["step", 0, (0, 3, 0, 1), 1, (0, 3, 1, 1), 2, (0, 3, 2, 1)]


def test_what_was_told_early_is_not_told_again() -> None:
    engine = make(Watched(), 3)
    engine.submit("0/1", make_request(list(range(1, 11)), 5), [], handoff_id=HANDOFF)
    output = engine.step(lambda early: None)
    assert [type(e) for e in output.handoffs] == [HandoffSealed]


def test_a_chunk_announces_its_full_blocks_alone() -> None:
    engine = make(Watched(), 2, chunk_tokens=6)
    engine.submit("0/1", make_request(list(range(1, 18)), 5), [], handoff_id=HANDOFF)
    # 6 tokens: block 0; 12: blocks 1 and 2; 17: block 3, and 4 of which one slot is filled.
    assert [segments(engine.step()) for _ in range(3)] == [
        [(0, 1, 0, 1), (0, 1, 1, 2)],
        [(1, 2, 0, 1), (1, 2, 1, 2)],
        [(3, 2, 0, 1), (3, 2, 1, 2)],
    ]


def test_a_chunk_that_fills_no_block_announces_nothing() -> None:
    engine = make(Watched(), 3, chunk_tokens=3)
    engine.submit("0/1", make_request(list(range(1, 9)), 5), [], handoff_id=HANDOFF)
    assert segments(engine.step()) == []


def test_a_cached_prefix_is_announced_before_anything_is_computed() -> None:
    runner = Watched()
    engine = make(runner, 3)
    prompt = list(range(1, 19))
    engine.submit("0/1", make_request(prompt, 1), [])
    engine.step()
    runner.log.clear()
    engine.submit("0/2", make_request(prompt, 5), [], handoff_id=HANDOFF)
    engine.step(lambda early: runner.log.extend(segments(early)))
    assert runner.log == [(0, 4, 0, 3), "step", 0, (4, 1, 0, 1), 1, (4, 1, 1, 1), 2, (4, 1, 2, 1)]


def test_what_commands_have_to_say_is_told_before_a_long_step() -> None:
    """The step may compute only other sequences."""
    runner = Watched()
    engine = make(runner, 3)
    engine.submit("0/1", make_request(list(range(1, 6)), 5), [])
    engine.outgoing.offer("0/2", "unknown")
    output = engine.step(lambda early: runner.log.extend(type(e) for e in early.handoffs))
    assert runner.log == [HandoffRefused, "step", 0, 1, 2]
    assert output.handoffs == []


def test_every_offered_sequence_of_a_batch_is_announced() -> None:
    engine = make(Watched(), 3)
    for key in ("a", "b"):
        engine.submit(f"0/{key}", make_request([ord(key)] * 5, 5), [], handoff_id=key)
    engine.submit("0/c", make_request([7] * 5, 5), [])
    announced: list[tuple[str, int]] = []
    engine.step(lambda early: announced.extend((e.handoff_id, e.segment.first_layer) for e in early.handoffs))  # type: ignore[union-attr]
    assert announced == [(key, layer) for layer in range(3) for key in ("a", "b")]


def compute_equal_blocks_twice(engine: Engine) -> None:
    """As sequences do that decode the same tokens; a prompt that is being computed would be waited for."""
    engine.scheduler._shared.park = lambda sequence, num_cached, beside=None: False  # type: ignore[method-assign]


def test_an_announced_block_keeps_its_name_where_the_cache_knows_an_equal_one() -> None:
    """Two equal prompts in one batch: after the step the second's table names the first's blocks."""
    engine = make(Watched(), 3)
    compute_equal_blocks_twice(engine)
    for key in ("a", "b"):
        engine.submit(f"0/{key}", make_request([5] * 9, 5), [], handoff_id=key)
    output = engine.step()
    named = {
        key: {e.segment.block_ids for e in output.handoffs if isinstance(e, SegmentReady) and e.handoff_id == key}
        for key in ("a", "b")
    }
    assert len(named["a"]) == len(named["b"]) == 1
    assert not set(*named["a"]) & set(*named["b"])
    assert engine.check_integrity().load.num_leased_blocks == 6  # b leases a's equal blocks too
    for key in ("a", "b"):
        engine.end_lease(key)
    assert_clean(engine)


def test_a_leased_block_keeps_its_ancestors_in_the_cache() -> None:
    """The second's blocks are children of the first's; the cache would lose an ancestor before its child."""
    engine = make(Watched(), 1)
    compute_equal_blocks_twice(engine)
    engine.submit("0/1", make_request([5] * 9, 1), [])
    engine.submit("0/2", make_request([5] * 8 + [6] * 9, 5), [], handoff_id=HANDOFF)
    engine.step()
    assert engine.check_integrity().load.num_leased_blocks == 7  # 5 that were announced, 2 that they are equal to
    engine.submit("0/3", make_request([7] * 57 * BLOCK, 1), [])
    engine.step()
    engine.end_lease(HANDOFF)
    assert_clean(engine)


def test_the_sum_over_layers_is_what_a_person_computes() -> None:
    engine = make(Watched(), 3)
    engine.submit("0/1", make_request([1, 2, 3], 9), [])
    got = [t.token_id for _ in range(9) for t in engine.step().tokens]
    assert got == fake_output([1, 2, 3], 9)


def test_a_step_that_fails_aborts_its_handoffs_and_frees_their_blocks() -> None:
    engine = make(Watched(fails_after=2), 3)
    engine.submit("0/1", make_request(list(range(1, 11)), 5), [], handoff_id=HANDOFF)
    early: list[StepOutput] = []
    with pytest.raises(RuntimeError):
        engine.step(early.append)
    assert [segments(output) for output in early] == [[(0, 3, 0, 1)], [(0, 3, 1, 1)]]
    engine.step_failed(RuntimeError("a kernel"))
    output = engine.step()
    assert [f.key for f in output.failures] == ["0/1"]
    assert [type(e) for e in output.handoffs] == [HandoffEnded]
    assert engine.check_integrity().load.num_leased_blocks == 3  # until its sink lets go
    engine.end_lease(HANDOFF)
    assert_clean(engine)
    engine.submit("0/2", make_request([4], 2), [])
    assert [t.token_id for _ in range(2) for t in engine.step().tokens] == [4, 8]


def test_groups_are_chosen_by_what_steps_and_reads_took() -> None:
    """A step of 12 tokens takes 0.12 s, by a clock that each layer moves on, and makes 3 blocks of 256 bytes: KV of 8
    layers, 4 slots. Reads cost 1 ms and 37.5 us a byte: sqrt(28.8 ms / 1 ms) = 5.4 groups.
    """
    now = 0.0

    class Timed(Watched):
        def _store(self, step: FakeStep, layer: int) -> None:
            nonlocal now
            super()._store(step, layer)
            now += step.num_tokens * 0.01 / self.layout.num_layers

    engine = make(Timed(num_layers=8), 0, lambda: now)

    def groups(handoff_id: str, token: int) -> int:
        engine.submit(f"0/{handoff_id}", make_request([token] * 12, 5), [], handoff_id=handoff_id)
        return len(segments(engine.step()))

    assert groups("first", 1) == 1
    engine.end_lease("", [(n, 0.001 + n * 37.5e-6) for n in (100, 1000)])
    assert groups("second", 2) == 5
