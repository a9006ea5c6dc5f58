"""A sequence whose release is not answered yet: it computes a step, and nothing of it is visible outside."""

import pytest

from diptych.workers.common.errors import HandoffError, RequestAborted
from diptych.workers.common.request import FinishReason
from diptych.workers.common.timings import HandoffTimings, PullTimes, SequenceTimings
from diptych.workers.core.batch_tables import BatchTables
from diptych.workers.core.prefix_cache import block_hashes
from diptych.workers.core.runner import LayerWatch
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Batch
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput, TokenEvent
from diptych.workers.handoff.types import HandoffOpened, HandoffRefused, Reservation
from diptych.workers.testing.fake_runner import FakeRunner, fake_output
from diptych.workers.testing.fake_stream import FakeStep

from ...support.engines import (
    Clock,
    Move,
    assert_clean,
    hand_over,
    make,
    make_seal,
    make_slow,
    reserve,
    run,
    tokens,
)
from ...support.sequences import make_request

KEY = Move.key
MAX_TOKENS = 6


def shown(outputs: list[StepOutput]) -> list[tuple[int, int]]:
    return [(t.position, t.token_id) for t in tokens(outputs, KEY)]


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 7, 8])
def test_one_token_is_made_and_kept_back_until_the_commit(num_prompt: int) -> None:
    sink, prompt = make(), list(range(1, num_prompt + 1))
    move = hand_over(sink, prompt)
    move.begin()
    outputs = [sink.step() for _ in range(3)]
    assert [output.ran for output in outputs] == [True, False, False]
    assert not any(output.tokens or output.stored for output in outputs)
    assert sink.check_integrity().num_unaccounted_blocks == 0
    move.commit()
    outputs = run(sink)
    assert shown(outputs) == list(enumerate(fake_output(prompt, MAX_TOKENS)))[1:]
    assert sink.check_integrity().load.num_handoffs_received == 1
    assert_clean(sink)
    assert_clean(move.source)


def test_a_commit_before_the_first_step_is_a_commit() -> None:
    sink = make()
    move = hand_over(sink, [1, 2, 3])
    move.begin()
    move.commit()
    assert shown(run(sink)) == list(enumerate(fake_output([1, 2, 3], MAX_TOKENS)))[1:]
    assert_clean(sink)


def test_the_token_leaves_before_the_next_step_computes() -> None:
    sink, told = make(), list[tuple[str, list[TokenEvent]]]()
    move = hand_over(sink, [1, 2, 3])
    move.begin()
    sink.step()
    move.commit()
    output = sink.step(lambda output: told.append(("while it runs", list(output.tokens))))
    expected = fake_output([1, 2, 3], MAX_TOKENS)
    assert [(when, [t.token_id for t in events]) for when, events in told] == [("while it runs", [expected[1]])]
    assert [t.token_id for t in output.tokens] == [expected[2]]


@pytest.mark.parametrize("has_stepped", [False, True])
def test_without_a_positive_release_nothing_is_left_of_it(has_stepped: bool) -> None:
    sink = make()
    move = hand_over(sink, list(range(1, 8)))  # the step fills a block
    move.begin()
    outputs = [sink.step()] if has_stepped else []
    sink.fail_import(KEY, quarantine=False)
    sink.fail_import(KEY, quarantine=False)
    outputs += run(sink)
    assert not any(output.tokens or output.stored or output.failures for output in outputs)
    assert sink.check_integrity().load.num_handoffs_received == 0
    assert sink.manager.num_cached == 0
    assert_clean(sink)


def test_the_kv_is_shared_only_after_the_commit() -> None:
    sink, prompt = make(), list(range(1, 12))
    move = hand_over(sink, prompt)
    move.begin()
    sink.step()
    names = block_hashes(prompt, sink.cache.block_size)
    assert not sink.cache.find(names)
    sink.outgoing.offer_prefix("h2", prompt, b"")
    sink.outgoing.offer(KEY, "h3")
    sink.submit("0/2", make_request(prompt, 3), [])
    outputs = [sink.step() for _ in range(3)]
    assert [type(event) for event in outputs[0].handoffs] == [HandoffRefused] * 2
    assert [t.num_cached for t in tokens(outputs, "0/2")] == [0, None, None]
    sink.cache.clear()
    move.commit()
    assert len(sink.cache.find(names)) == 2
    run(sink)
    assert_clean(sink)


def test_who_waits_for_the_same_blocks_waits_for_the_commit() -> None:
    sink, prompt = make(), list(range(1, 9))
    move = hand_over(sink, prompt)
    sink.submit("0/2", make_request(prompt, 4), [], importing=True)
    assert reserve(sink, "0/2", len(prompt)) is None, "its blocks are on the way"
    granted = list[object]()
    sink.incoming.reserve("0/2", len(prompt), granted.append)
    move.begin()
    sink.step()
    assert not granted
    move.commit()
    run(sink)
    assert [r.num_held_tokens for r in granted if isinstance(r, Reservation)] == [4]
    sink.fail_import("0/2", quarantine=False)
    assert_clean(sink)


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("late", ["commit", "fail"])
def test_an_aborted_one_waits_for_its_pull_like_any_other(has_stepped: bool, late: str) -> None:
    sink = make()
    move = hand_over(sink, [1, 2, 3])
    move.begin()
    outputs = [sink.step()] if has_stepped else []
    sink.abort(KEY)
    sink.abort(KEY)
    outputs.append(sink.step())
    assert sink.check_integrity().load.num_free_blocks == 63, "until the pull says that it has stopped"
    if late == "commit":
        with pytest.raises(RequestAborted):
            move.commit()
    sink.fail_import(KEY, quarantine=False)
    assert not any(output.tokens for output in [*outputs, *run(sink)])
    assert_clean(sink)


def test_its_deadline_ends_it() -> None:
    clock = Clock()
    sink = make(clock=clock)
    move = hand_over(sink, [1, 2, 3])
    move.begin()
    sink.step()
    clock.now += 61
    assert [f.key for f in sink.step().failures] == [KEY]
    sink.fail_import(KEY, quarantine=False)
    assert_clean(sink)


def test_a_step_that_fails_takes_it_along() -> None:
    sink = make()
    move = hand_over(sink, [1, 2, 3])
    move.begin()
    sink.step_failed(RuntimeError("a kernel"))
    assert [f.key for f in sink.step().failures] == [KEY]
    sink.fail_import(KEY, quarantine=False)
    assert_clean(sink)


def test_it_is_never_preempted() -> None:
    sink = make(num_blocks=7, prefix_cache=False)
    sink.submit("0/2", make_request([1] * 12, 9), [])
    sink.step()
    move = hand_over(sink, list(range(1, 12)))
    move.begin()
    outputs = [sink.step() for _ in range(8)]  # the older one needs a block that is not there
    assert sink.scheduler.num_preemptions == 1 and sink.scheduler.num_waiting == 1
    move.commit()
    outputs += run(sink)
    assert shown(outputs) == list(enumerate(fake_output(list(range(1, 12)), MAX_TOKENS)))[1:]
    assert [t.token_id for t in tokens(outputs, "0/2")] == fake_output([1] * 12, 9)[1:]
    assert_clean(sink)


def test_without_a_block_for_its_token_it_begins_with_the_commit() -> None:
    sink = make(num_blocks=4, prefix_cache=False)
    move = hand_over(sink, list(range(1, 9)))  # a third block for the first token's KV
    sink.submit("0/2", make_request([5] * 7, 1), [])
    sink.scheduler.schedule()  # which takes the last two blocks
    move.begin()
    assert not any(sequence.key == KEY for sequence in sink.scheduler.sequences())
    move.commit()
    assert any(sequence.key == KEY for sequence in sink.scheduler.sequences())


@pytest.mark.parametrize(("prompt", "max_tokens", "finish"), [([1, 2], 2, "length"), ([300, 200], 9, "stop")])
def test_the_token_that_was_kept_back_may_be_the_last(prompt: list[int], max_tokens: int, finish: str) -> None:
    sink = make()
    move = hand_over(sink, prompt, max_tokens)
    move.begin()
    sink.step()
    move.commit()
    (last,) = tokens(run(sink), KEY)
    assert last.token_id == fake_output(prompt, max_tokens)[1] and last.finish is FinishReason(finish)
    assert_clean(sink)


@pytest.mark.parametrize(("num_computed", "outputs"), [(3, [-1]), (3, [1000]), (2, [6]), (3, [6, 12]), (3, [])])
def test_what_the_source_gets_wrong_is_said_at_the_commit(num_computed: int, outputs: list[int]) -> None:
    sink = make()
    hand_over(sink, [1, 2, 3])
    sink.begin("0/9", make_seal(3, [6]))
    sink.begin(KEY, make_seal(num_computed, outputs))
    assert not sink.scheduler.has_work
    with pytest.raises(HandoffError):
        sink.commit(KEY, make_seal(num_computed, outputs), PullTimes())
    sink.fail_import(KEY, quarantine=False)
    assert_clean(sink)


def test_who_is_handed_on_at_once_begins_with_the_commit() -> None:
    sink, request = make(), make_request([1, 2, 3], MAX_TOKENS)
    sink.submit(KEY, request, [], importing=True, handoff_id="onward")
    assert isinstance(reserve(sink, KEY, 3), Reservation)
    sink.begin(KEY, make_seal(3, [6]))
    assert not sink.scheduler.has_work


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_who_is_handed_on_and_preempted_holds_each_announced_block_once(prefix_cache: bool) -> None:
    """Its blocks are read and announced, and there is none for its next token: it is computed anew, in four chunks."""
    sink, third, prompt = make(num_blocks=8, prefix_cache=prefix_cache, max_batch_tokens=3), make(), list(range(1, 9))
    move, onward = Move(make(), sink), Move(sink, third, handoff_id="onward")
    for engine, given in ((sink, {"handoff_id": "onward"}), (third, {})):
        engine.submit(KEY, make_request(prompt, MAX_TOKENS), [], importing=True, **given)
    move.source.submit("0/0", make_request(prompt, MAX_TOKENS), [], handoff_id=move.handoff_id)
    move.hear(run(move.source))
    move.opened = onward.opened = HandoffOpened(move.handoff_id, None, 9, is_live=False)
    sink.submit("0/2", make_request([9] * 20, MAX_TOKENS), [], importing=True)
    move.reservation = reserve(sink, KEY, len(prompt))
    assert isinstance(reserve(sink, "0/2", 21), Reservation)
    move.commit()
    outputs = [sink.step()]
    assert sink.scheduler.num_preemptions == 1
    sink.fail_import("0/2", quarantine=False)
    onward.hear(outputs := [*outputs, *run(sink)])
    assert sink.check_integrity().load.num_leased_blocks == (3 if prefix_cache else 5)
    onward.commit()
    assert shown([*outputs, *run(third)]) == list(enumerate(fake_output(prompt, MAX_TOKENS)))[1:]
    assert_clean(sink)
    assert_clean(third)


class TabledRunner(FakeRunner):
    """Keeps block tables from step to step, as compiled steps do, and compares them with the sequences' own."""

    def __init__(self) -> None:
        super().__init__()
        self._tables = BatchTables(self.layout.block_size, max_blocks=64)

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> FakeStep:
        for entry, row in zip(batch.entries, self._tables.update(batch.entries), strict=True):
            num_blocks = (entry.sequence.num_computed + entry.num_new - 1) // self.layout.block_size + 1
            assert self._tables.array[row, :num_blocks].tolist() == entry.sequence.block_table[:num_blocks]
        return super().launch(batch, watch)


def test_blocks_that_the_commit_replaces_are_replaced_in_kept_tables() -> None:
    sink, prompt = Engine(TabledRunner(), SchedulerConfig(), clock=Clock()), list(range(1, 12))
    move = hand_over(sink, prompt)
    move.begin()
    sink.step()
    sink.submit("0/2", make_request(prompt, 9), [])  # its blocks are cached first
    sink.step()
    move.commit()
    assert shown(run(sink)) == list(enumerate(fake_output(prompt, MAX_TOKENS)))[1:]
    assert_clean(sink)


@pytest.mark.parametrize("answer_s", [0.0, 5.0])
def test_its_parts_sum_to_what_passed(answer_s: float) -> None:
    """Begun 3 s after the last read, in a step half a second later; the answer is there with the token, or after it."""
    clock = Clock()
    sink = make_slow(clock)
    hand_over(sink, [1, 2, 3])
    clock.now += 7
    sink.begin(KEY, make_seal(3, [6]))
    clock.now += 0.5
    sink.step()
    clock.now += answer_s
    times = PullTimes(announce_to_pull_s=0.25, pull_s=3, last_segment_s=1, read_at=4, num_bytes=99, transport="grpc")
    sink.commit(KEY, make_seal(3, [6]), times)
    handoff = HandoffTimings(0.25, 3, 1, release_s=3 + answer_s, num_bytes=99, transport="grpc")
    assert tokens([sink.step()], KEY)[0].timings == SequenceTimings(0.5, 2, handoff)
