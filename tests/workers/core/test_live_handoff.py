"""When a running sequence stops for its sink, and what its hand-off takes there."""

import pytest

from diptych.workers.common.errors import (
    DeadlineExceeded,
    DiptychError,
    HandoffError,
    LeaseLost,
    OutOfBlocks,
    RequestAborted,
    SequenceEnded,
)
from diptych.workers.core.live_handoff import NEAR_BLOCKS, SLACK_BLOCKS, SinkLag, offered_tokens, slack_tokens
from diptych.workers.handoff.sink_machine import SinkHandoff
from diptych.workers.handoff.source_machine import SourceHandoff
from diptych.workers.handoff.types import CaughtUp, Offer, Refuse, Renew, SinkAction
from diptych.workers.kv.segment import Read, Segment

NUM_LAYERS = 3
BLOCK = 4  # tokens
HISTORY = 8  # blocks that there are at the offer
NUM_BLOCKS = HISTORY + SLACK_BLOCKS


def segment(first: int, num: int = 1) -> Segment:
    return Segment(first, tuple(range(first, first + num)), (1,) * num, 0, NUM_LAYERS)


class Chase:
    """Both state machines of one hand-off; the source announces while the sink reads."""

    def __init__(self) -> None:
        self._source = SourceHandoff(NUM_BLOCKS, NUM_LAYERS, lease_s=10.0, now=0.0, is_live=True)
        self._sink = SinkHandoff(deadline=100.0, open_by=8.0)
        self._source.subscribe("sink", 0.0)
        self._sink.opened(Offer(NUM_BLOCKS * BLOCK, NUM_BLOCKS, BLOCK, 10.0, NUM_LAYERS, NUM_LAYERS, is_live=True), 0.0)
        self._num_announced = 0
        self.reading: list[int] = []
        self.must_stop = False
        self.announce(HISTORY)
        self._hear(self._sink.reserved(tuple(range(NUM_BLOCKS)), 0, 0.0))

    def announce(self, num_blocks: int) -> None:
        announced = segment(self._num_announced, num_blocks)
        self._num_announced += num_blocks
        self._source.announce(announced, 0.0)
        self._hear(self._sink.announced(announced, 0.0))

    def finish_read(self, number: int) -> None:
        self.reading.remove(number)
        self._hear(self._sink.read_done(number, 0.0))

    def _hear(self, actions: list[SinkAction]) -> None:
        for action in actions:
            if isinstance(action, Read):
                self.reading.append(action.number)
            elif isinstance(action, Renew):
                self.must_stop |= CaughtUp() in self._source.renew("sink", 0.0, action.num_read)


@pytest.mark.parametrize("num_behind", [1, 2, 3, 4])
def test_a_sequence_stops_for_a_sink_that_is_always_some_blocks_behind(num_behind: int) -> None:
    """The next block is announced before a block is read, so there is never a moment at which everything is read."""
    chase = Chase()
    for _ in range(num_behind):
        chase.announce(1)
    num_rounds = 0
    while not chase.must_stop:
        chase.announce(1)
        chase.finish_read(min(chase.reading))
        num_rounds += 1
        assert num_rounds <= 2
    assert chase.reading


def test_it_does_not_stop_before_what_there_was_is_read() -> None:
    chase = Chase()
    for _ in range(2):
        chase.announce(1)
        chase.finish_read(max(chase.reading))  # the new block, while the others are still on their way
        assert not chase.must_stop
    chase.finish_read(0)
    assert chase.must_stop and not chase.reading


def test_it_runs_on_while_its_sink_gains_on_it() -> None:
    lag, segments = SinkLag(), [segment(0, HISTORY), *(segment(HISTORY + i) for i in range(7))]
    assert not lag.must_stop(segments[:7], 0), "nothing is read"
    assert not lag.must_stop(segments[:7], 1), "six blocks are not read"
    assert not lag.must_stop(segments, 3), "five"
    assert not lag.must_stop(segments, 9) and not lag.must_stop(segments, -1), "there are not so many"
    assert lag.must_stop(segments, 3), "five still"
    assert SinkLag().must_stop(segments, len(segments) - NEAR_BLOCKS)
    assert SinkLag().must_stop([], 0), "it has no full block"


def test_blocks_count_once_however_many_segments_their_layers_come_in() -> None:
    layers = [Segment(HISTORY + i, (5,), (1,), layer, 1) for i in range(2) for layer in range(NUM_LAYERS)]
    assert SinkLag().must_stop([segment(0, HISTORY), *layers], 1)


def test_what_may_be_made_meanwhile_grows_with_what_must_be_read() -> None:
    assert slack_tokens(1, BLOCK) == SLACK_BLOCKS * BLOCK
    assert slack_tokens(160 * BLOCK, BLOCK) == (SLACK_BLOCKS + 10) * BLOCK
    assert offered_tokens(160 * BLOCK, 1000, BLOCK) == (170 + SLACK_BLOCKS) * BLOCK
    assert offered_tokens(160 * BLOCK, 5, BLOCK) == 160 * BLOCK + 5


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestAborted("the sequence finished"), SequenceEnded),
        (SequenceEnded("the sequence is not here"), SequenceEnded),
        (DeadlineExceeded("it ran out of time"), SequenceEnded),
        (OutOfBlocks("it lost its blocks"), LeaseLost),
        (HandoffError("the sink did not catch up"), LeaseLost),
    ],
)
def test_a_sink_that_comes_when_all_is_over_is_told_whether_the_sequence_ended(
    error: DiptychError, kind: type[DiptychError]
) -> None:
    source = SourceHandoff(NUM_BLOCKS, NUM_LAYERS, lease_s=10.0, now=0.0, is_live=True)
    source.abort(error, 1.0)
    [refusal] = source.subscribe("sink", 2.0)
    assert isinstance(refusal, Refuse) and type(refusal.error) is kind
    assert error.message in refusal.error.message
