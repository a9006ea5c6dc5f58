"""One request's state machine: every order of events that we could name, and thousands that we could not."""

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from diptych.cluster.generation import TokenLogprob
from diptych.cluster.policy import Route
from diptych.cluster.request_record import (
    Abort,
    Action,
    Choose,
    ChooseSink,
    Forget,
    Leg,
    LegToken,
    Part,
    RequestRecord,
    Spoke,
    Submit,
)
from diptych.workers.errors import (
    DeadlineExceeded,
    DiptychError,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    OutOfBlocks,
    RequestAborted,
    TransportError,
    Unavailable,
    WorkerDraining,
    WorkerLost,
)
from diptych.workers.request import Request, SamplingParams
from diptych.workers.sequence import FinishReason

LOST = WorkerLost("lost")
KV_FAILED = TransportError("the pull failed")


class Driver:
    """A record with handles 1, 2, ..; `log` holds the actions of the last event."""

    def __init__(self, max_tokens: int = 4, max_attempts: int = 3, logprobs: int | None = None) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
        self.record = RequestRecord(Request("request", (1, 2, 3), sampling, timeout_s=60.0), max_attempts)
        self.handles = itertools.count(1)
        self.log: list[Action] = []

    def begin(self, prefill: str | None, decode: str) -> None:
        self.log = list(self.record.begin(Route(prefill, decode), "secret", self.handles))

    def token(self, handle: int, position: int, finish: FinishReason | None = None) -> None:
        self.log = list(self.record.token(handle, LegToken(position, 100 + position, finish)))

    def failed(self, handle: int, error: DiptychError, handoff: bool = False) -> None:
        self.log = list(self.record.failed(handle, error, handoff=handoff))

    def sink(self, worker: str | None) -> None:
        self.log = list(self.record.begin_sink(worker, self.handles))

    @property
    def told(self) -> list[tuple[str, int | str]]:
        """The last event's actions in short."""
        short: list[tuple[str, int | str]] = []
        for action in self.log:
            match action:
                case Choose():
                    short.append(("choose", ""))
                case ChooseSink():
                    short.append(("choose sink", action.source))
                case _:
                    short.append((type(action).__name__.lower(), action.leg.handle))
        return short

    def taken(self) -> list[int]:
        delta = self.record.take()
        return list(delta.token_ids) if delta else []


def split() -> Driver:
    driver = Driver()
    driver.begin("P", "D")
    return driver


def test_one_worker_alone() -> None:
    driver = Driver(max_tokens=2)
    driver.begin(None, "W")
    (submit,) = driver.log
    assert isinstance(submit, Submit)
    assert (submit.leg.worker, submit.leg.part, submit.handoff_id, submit.source) == ("W", Part.ALONE, None, None)
    driver.token(1, 0)
    assert driver.told == [("spoke", 1)]
    assert driver.taken() == [100]
    driver.token(1, 1, FinishReason.LENGTH)
    assert driver.told == [("forget", 1)]
    delta = driver.record.take()
    assert delta is not None
    assert (delta.token_ids, delta.finish_reason) == ((101,), FinishReason.LENGTH)
    assert driver.record.take() is None


def test_two_workers_share_a_hand_off_and_the_tokens_merge() -> None:
    driver = split()
    source, sink = driver.log
    assert isinstance(source, Submit)
    assert isinstance(sink, Submit)
    assert (source.leg.part, source.handoff_id, source.source) == (Part.PREFILL, "secret", None)
    assert (sink.leg.part, sink.handoff_id, sink.source) == (Part.DECODE, "secret", "P")
    driver.token(1, 0)
    assert driver.told == [("spoke", 1)]
    for position in (1, 2):
        driver.token(2, position)
    assert driver.taken() == [100, 101, 102]
    driver.token(2, 3, FinishReason.LENGTH)
    assert sorted(driver.told) == [("forget", 1), ("forget", 2)]


def test_decode_tokens_that_overtake_the_first_wait_for_it() -> None:
    driver = split()
    for position in (1, 2):
        driver.token(2, position)
    driver.token(2, 3, FinishReason.LENGTH)
    assert driver.taken() == []
    driver.token(1, 0)
    assert driver.taken() == [100, 101, 102, 103]
    assert driver.record.finish is FinishReason.LENGTH


def test_a_request_that_ends_with_its_first_token_stops_the_sink() -> None:
    driver = split()
    driver.token(1, 0, FinishReason.STOP)
    assert ("abort", 2) in driver.told
    assert ("forget", 1) in driver.told
    assert driver.record.finish is FinishReason.STOP


def test_a_sink_told_of_the_end_before_we_are() -> None:
    """The source finishes with its first token: the sink hears of it first, and fails."""
    driver = split()
    driver.failed(2, RequestAborted("the sequence finished with its first token"), handoff=True)
    assert driver.told == [("forget", 2)]
    driver.token(1, 0, FinishReason.STOP)
    assert driver.told == [("spoke", 1), ("forget", 1)]
    assert driver.record.finish is FinishReason.STOP


def test_duplicates_and_late_tokens_are_dropped() -> None:
    driver = split()
    driver.token(1, 0)
    driver.token(1, 0)
    driver.token(2, 0)
    driver.token(2, 1)
    driver.token(2, 1)
    driver.token(77, 2)
    assert driver.taken() == [100, 101]
    assert driver.record.error is None


@pytest.mark.parametrize(
    ("handle", "position", "before"), [(2, 2, [(1, 0)]), (2, 2, []), (1, 1, []), (2, 4, [(1, 0), (2, 1)])]
)
def test_a_gap_is_an_error_and_never_a_wrong_answer(handle: int, position: int, before: list[tuple[int, int]]) -> None:
    driver = split()
    for given in before:
        driver.token(*given)
    driver.token(handle, position)
    assert isinstance(driver.record.error, InternalError)
    assert {("abort", 1), ("abort", 2)} <= set(driver.told)


def test_more_tokens_than_asked_for_are_an_error() -> None:
    driver = Driver(max_tokens=1)
    driver.begin(None, "W")
    driver.token(1, 0)
    assert isinstance(driver.record.error, InternalError)
    assert ("abort", 1) in driver.told


def test_prefill_lost_before_its_token() -> None:
    driver = split()
    driver.token(2, 1)  # it overtook; it will come again
    driver.failed(1, LOST)
    assert driver.told == [("forget", 1), ("abort", 2), ("choose", "")]
    assert driver.record.excluded == {"P"}
    driver.begin("P2", "D")
    assert isinstance(driver.log[0], Submit)
    assert driver.log[0].output_token_ids == ()
    driver.token(3, 0)
    driver.token(4, 1)
    assert driver.taken() == [100, 101]


def test_prefill_lost_after_its_token_is_the_decode_workers_affair() -> None:
    driver = split()
    driver.token(1, 0)
    driver.failed(1, LOST)
    assert driver.told == [("forget", 1)]
    driver.token(2, 1)
    assert driver.taken() == [100, 101]


def test_hand_off_failed_after_the_first_token_resumes_after_it() -> None:
    driver = split()
    driver.token(1, 0)
    driver.failed(2, KV_FAILED, handoff=True)
    assert driver.told == [("forget", 2), ("abort", 1), ("choose", "")]
    driver.begin(None, "P")
    assert isinstance(driver.log[0], Submit)
    assert driver.log[0].output_token_ids == (100,)
    driver.token(3, 1)
    assert driver.taken() == [100, 101]


def test_hand_off_failed_before_the_first_token_waits_for_it() -> None:
    driver = split()
    driver.failed(2, KV_FAILED, handoff=True)
    assert driver.told == [("forget", 2)]
    driver.token(1, 0)
    assert driver.told == [("spoke", 1), ("abort", 1), ("choose", "")]
    assert driver.taken() == [100]


def test_hand_off_failed_and_then_prefill_too() -> None:
    driver = split()
    driver.failed(2, KV_FAILED, handoff=True)
    driver.failed(1, LOST)
    assert driver.told == [("forget", 1), ("choose", "")]
    assert driver.record.excluded == {"P", "D"}
    assert driver.record.num_failures == 1
    driver.begin("P2", "D2")
    driver.token(3, 0)
    assert driver.told == [("spoke", 3)]  # what failed before is forgotten


def test_a_sink_lost_before_it_pulled_is_replaced_at_the_same_offer() -> None:
    for first_is_here in (False, True):
        driver = split()
        if first_is_here:
            driver.token(1, 0)
        driver.failed(2, LOST)
        assert driver.told == [("forget", 2), ("choose sink", "P")]
        driver.sink("D2")
        (submit,) = driver.log
        assert isinstance(submit, Submit)
        assert (submit.leg.worker, submit.handoff_id, submit.source) == ("D2", "secret", "P")
        assert submit.output_token_ids == ()  # as they were when the offer was made
        if not first_is_here:
            driver.token(1, 0)
        driver.token(3, 1)
        assert driver.taken() == [100, 101]
        assert driver.record.num_failures == 0


def test_only_one_more_sink_is_sent_to_an_offer() -> None:
    driver = split()
    driver.token(1, 0)
    driver.failed(2, OutOfBlocks("full"))
    driver.sink("D2")
    driver.failed(3, LOST)
    assert driver.told == [("forget", 3), ("abort", 1), ("choose", "")]


def test_sinks_that_drain_may_be_replaced_as_often_as_there_are_others() -> None:
    driver = split()
    for handle in (2, 3, 4):
        driver.failed(handle, WorkerDraining("draining"))
        assert driver.told[-1] == ("choose sink", "P")
        driver.sink(f"D{handle}")
    assert driver.record.num_failures == 0


def test_no_other_sink() -> None:
    driver = split()
    driver.failed(2, LOST)
    driver.sink(None)
    assert driver.told == []  # the first token is on its way
    driver.token(1, 0)
    assert driver.told == [("spoke", 1), ("abort", 1), ("choose", "")]
    driver = split()
    driver.token(1, 0)
    driver.failed(2, LOST)
    driver.sink(None)
    assert driver.told == [("abort", 1), ("choose", "")]


def test_decode_lost_in_the_middle() -> None:
    driver = split()
    driver.token(1, 0)
    driver.token(2, 1)
    driver.failed(2, LOST)
    assert driver.told == [("forget", 2), ("abort", 1), ("choose", "")]
    driver.begin("P", "D2")
    assert [s.output_token_ids for s in driver.log if isinstance(s, Submit)] == [(100, 101)] * 2
    driver.token(3, 2)
    driver.token(4, 3, FinishReason.LENGTH)
    assert driver.taken() == [100, 101, 102, 103]
    assert driver.record.num_attempts == 2


def test_decode_lost_after_it_overtook_loses_nothing() -> None:
    driver = split()
    driver.token(2, 1)
    driver.failed(2, LOST)
    assert driver.told == [("forget", 2)]
    driver.token(1, 0)
    assert driver.told == [("spoke", 1), ("abort", 1), ("choose", "")]
    assert driver.taken() == [100, 101]


def test_decode_that_finished_and_broke_while_the_first_token_was_due() -> None:
    driver = split()
    for position in (1, 2):
        driver.token(2, position)
    driver.token(2, 3, FinishReason.LENGTH)
    driver.failed(2, LOST)
    driver.token(1, 0)
    assert driver.taken() == [100, 101, 102, 103]
    assert driver.record.finish is FinishReason.LENGTH
    assert driver.told == [("spoke", 1), ("forget", 1)]


def test_what_no_worker_can_mend_ends_the_request() -> None:
    driver = split()
    driver.failed(1, InvalidRequest("bad"))
    assert driver.told == [("forget", 1), ("abort", 2)]
    assert isinstance(driver.record.error, InvalidRequest)


def test_attempts_are_bounded_and_the_last_error_is_told() -> None:
    driver = Driver(max_attempts=2)
    for number in (1, 2):
        driver.begin(None, "W")
        driver.failed(number, LOST)
    assert driver.told == [("forget", 2)]
    assert isinstance(driver.record.error, Unavailable)
    assert "2 attempts" in driver.record.error.message
    assert "WorkerLost: lost" in driver.record.error.message


def test_draining_is_no_failure() -> None:
    driver = Driver(max_attempts=2)
    for number in range(1, 9):
        driver.begin(None, f"W{number}")
        driver.failed(number, WorkerDraining("draining"))
        assert driver.told[-1] == ("choose", "")


def test_the_last_attempt_does_without_a_hand_off_that_failed() -> None:
    driver = split()
    driver.token(1, 0)
    driver.failed(2, KV_FAILED, handoff=True)
    assert driver.record.may_hand_off
    driver.begin("P", "D2")
    driver.failed(4, KV_FAILED, handoff=True)
    driver.token(3, 1)
    assert not driver.record.may_hand_off


def test_layouts_that_differ_are_not_tried_again() -> None:
    driver = split()
    error = LayoutMismatch("block_size: 16 here, 32 there")
    assert not error.retryable
    driver.failed(2, error, handoff=True)
    driver.token(1, 0)
    assert driver.told[-1] == ("choose", "")
    assert not driver.record.may_hand_off


def test_the_deadline_and_the_client_abort_all_legs_once() -> None:
    for error in (DeadlineExceeded("late"), RequestAborted("gone")):
        driver = split()
        driver.token(1, 0)
        assert [type(a) for a in driver.record.fail(error)] == [Abort, Abort]
        assert driver.record.fail(RequestAborted("again")) == ()
        assert driver.record.error is error
        driver.token(2, 1)
        driver.failed(2, LOST)
        assert driver.told == []
        assert driver.taken() == [100]


def test_logprobs_and_cached_tokens_come_with_their_tokens() -> None:
    driver = Driver(logprobs=0)
    driver.begin("P", "D")
    values = [TokenLogprob(100 + i, -0.5 * i) for i in range(3)]
    driver.record.token(2, LegToken(1, 101, None, values[1], 3))
    driver.record.token(1, LegToken(0, 100, None, values[0], 2))
    first = driver.record.take()
    assert first is not None
    assert (first.logprobs, first.num_cached_tokens) == (tuple(values[:2]), 2)
    driver.record.token(2, LegToken(2, 102, None, values[2]))
    second = driver.record.take()
    assert second is not None
    assert (second.logprobs, second.num_cached_tokens) == ((values[2],), 0)
    driver.token(2, 3)
    assert isinstance(driver.record.error, InternalError)


# -- every order that a seed can find ------------------------------------------------------------------------------


@dataclass
class SimulatedLeg:
    """A leg as its worker sees it. What it says waits in `stream` until the router reads it."""

    leg: Leg
    position: int  # of its next token
    source: "SimulatedLeg | None" = None
    stream: deque[LegToken | tuple[DiptychError, bool]] = field(default_factory=deque)
    is_done: bool = False  # says nothing more
    has_offer: bool = False  # its KV can be pulled
    has_pulled: bool = False


class Simulation:
    """Workers that compute, die, drain and fail at random; streams that are read in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_tokens = self.random.randint(1, 6)
        self.finish = self.random.choice([FinishReason.STOP, FinishReason.LENGTH])
        self.num_faults = self.random.choice([0, 1, 2, 4, 8])
        max_tokens = self.num_tokens if self.finish is FinishReason.LENGTH else self.num_tokens + 3
        request = Request("request", (1, 2, 3), SamplingParams(max_tokens=max_tokens), timeout_s=60.0)
        self.record = RequestRecord(request, max_attempts=20)
        self.handles = itertools.count(1)
        self.legs: dict[int, SimulatedLeg] = {}
        self.closed: set[int] = set()
        self.delivered: list[int] = []
        self.last_finish: FinishReason | None = None

    def run(self) -> None:
        self._do([Choose()])
        while not self.record.is_over:
            choices = [self._compute] * 3 + [self._read] * 3 + [self._fault]
            self.random.choice(choices)()
            self._take()
        assert self.closed == set(self.legs), "a leg was left running"

    def _take(self) -> None:
        delta = self.record.take()
        if delta is not None:
            assert self.last_finish is None
            self.delivered += delta.token_ids
            self.last_finish = delta.finish_reason

    def _live(self) -> list[SimulatedLeg]:
        live = [s for handle, s in self.legs.items() if handle not in self.closed]
        assert live, "nobody works for the request: it would hang"
        assert any(not s.is_done or s.stream for s in live), "nobody will ever say anything: it would hang"
        return live

    def _compute(self) -> None:
        leg = self.random.choice(self._live())
        if leg.is_done:
            return
        if leg.leg.part is Part.DECODE and not leg.has_pulled:
            assert leg.source is not None
            if leg.source.is_done and not leg.source.has_offer:
                leg.is_done = True
                leg.stream.append((KV_FAILED, True))
                return
            if not leg.source.has_offer:
                return
            leg.has_pulled, leg.source.has_offer = True, False
        self._say_token(leg)

    def _say_token(self, leg: SimulatedLeg) -> None:
        is_last = leg.position == self.num_tokens - 1
        leg.stream.append(LegToken(leg.position, 100 + leg.position, self.finish if is_last else None))
        if self.random.random() < 0.1:
            leg.stream.append(leg.stream[-1])
        leg.position += 1
        leg.has_offer = leg.leg.part is Part.PREFILL and not is_last
        leg.is_done = is_last or leg.leg.part is Part.PREFILL

    def _read(self) -> None:
        leg = self.random.choice([s for s in self.legs.values() if s.stream] or self._live())
        if not leg.stream:
            return
        message = leg.stream.popleft()
        if isinstance(message, LegToken):
            self._do(self.record.token(leg.leg.handle, message))
        else:
            self._do(self.record.failed(leg.leg.handle, message[0], handoff=message[1]))

    def _fault(self) -> None:
        leg = self.random.choice(self._live())
        if self.num_faults == 0:
            return
        self.num_faults -= 1
        kind = self.random.choice(["lost", "failed", "hand-off", "draining"])
        if kind == "lost":
            leg.is_done, leg.has_offer = True, False
            leg.stream.clear()
            self._do(self.record.failed(leg.leg.handle, LOST))
        elif kind == "hand-off" and leg.leg.part is Part.DECODE and not leg.is_done and not leg.has_pulled:
            leg.is_done = True
            leg.stream.append((KV_FAILED, True))
        elif kind == "failed" and not leg.is_done:
            leg.is_done = True
            leg.stream.append((OutOfBlocks("full"), False))
        elif kind == "draining" and not leg.is_done and not leg.stream:
            leg.is_done = True
            leg.stream.append((WorkerDraining("draining"), False))

    def _do(self, actions: object) -> None:
        assert isinstance(actions, (list, tuple))
        for action in actions:
            match action:
                case Choose():
                    a, b = self.random.sample("VWXYZ", 2)
                    route = Route(self.random.choice([None, a, a]), b)
                    self._do(self.record.begin(route, "secret", self.handles))
                case ChooseSink():
                    sink = self.random.choice([None, "S"])
                    self._do(self.record.begin_sink(sink, self.handles))
                case Submit():
                    self._submit(action)
                case Spoke():
                    assert action.leg.handle in self.legs
                case Abort() | Forget():
                    handle = action.leg.handle
                    assert handle not in self.closed, "closed twice"
                    self.closed.add(handle)
                    leg = self.legs[handle]
                    if isinstance(action, Forget):
                        assert leg.is_done, "still runs: it has to be aborted"
                    leg.is_done, leg.has_offer = True, False
                case _:
                    raise AssertionError(action)

    def _submit(self, submit: Submit) -> None:
        assert list(submit.output_token_ids) == [100 + i for i in range(len(submit.output_token_ids))]
        leg = SimulatedLeg(submit.leg, len(submit.output_token_ids))
        if submit.source is not None:
            source = [s for s in self.legs.values() if s.leg.part is Part.PREFILL][-1]
            assert source.leg.handle not in self.closed
            leg.source, leg.position = source, leg.position + 1
        self.legs[submit.leg.handle] = leg


@pytest.mark.parametrize("block", range(8))
def test_any_order_of_anything_gives_the_same_tokens(block: int) -> None:
    for seed in range(block * 1000, (block + 1) * 1000):
        simulation = Simulation(seed)
        try:
            simulation.run()
            assert simulation.record.error is None
            assert simulation.delivered == [100 + i for i in range(simulation.num_tokens)]
            assert simulation.last_finish is simulation.finish
        except AssertionError as e:
            raise AssertionError(f"seed {seed}") from e
