"""When a step has too little device memory, only the requests that made it large end."""

import random
from dataclasses import replace

import pytest

from diptych.workers.common.errors import OutOfDeviceMemory
from diptych.workers.core.runner import LayerWatch
from diptych.workers.core.scheduler import Scheduler
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Batch, SampledToken
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.handoff.types import HandoffEnded, HandoffOpened, Reservation
from diptych.workers.testing.fake_runner import FakeRunner, fake_output
from diptych.workers.testing.fake_stream import FakeStep

from ...support.engines import HANDOFF, Clock, Move, assert_clean, reserve, run, tokens
from ...support.sequences import make_request

PROMPT = [1, 2, 3, 5, 7, 11]  # no sum on its way is a multiple of 1000
LONG = [2] * 40


class SmallDevice(FakeRunner):
    """Runner with memory for `most` tokens per step; it detects a shortage after it has stored KV."""

    def __init__(self, *, looks_ahead: bool, at_launch: bool) -> None:
        super().__init__(num_blocks=96, looks_ahead=looks_ahead)
        self.most, self.at_launch = 1 << 30, at_launch
        self.num_failed = 0

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> FakeStep:
        if self.at_launch:
            self._check(batch.num_tokens)
        return super().launch(batch, watch)

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        sampled = super()._compute(replace(step, watch=None) if step.num_tokens > self.most else step)
        self._check(step.num_tokens)
        return sampled

    def _check(self, num_tokens: int) -> None:
        if num_tokens > self.most:
            self.num_failed += 1
            raise OutOfDeviceMemory("too little memory")


def device_of(engine: Engine) -> SmallDevice:
    assert isinstance(engine._runner, SmallDevice)
    return engine._runner


@pytest.fixture(params=[(False, False), (True, False), (True, True)], ids=["lockstep", "ahead", "at launch"])
def engine(request: pytest.FixtureRequest) -> Engine:
    looks_ahead, at_launch = request.param
    runner = SmallDevice(looks_ahead=looks_ahead, at_launch=at_launch)
    return Engine(runner, SchedulerConfig(), clock=Clock())


def ids(outputs: list[StepOutput], key: str) -> list[int]:
    return [event.token_id for event in tokens(outputs, key)]


def failed(outputs: list[StepOutput]) -> list[str]:
    failures = [failure for output in outputs for failure in output.failures]
    assert all(isinstance(failure.error, OutOfDeviceMemory) for failure in failures)
    return [failure.key for failure in failures]


def test_a_prompt_too_long_ends_alone(engine: Engine) -> None:
    device_of(engine).most = 20
    engine.submit("0/1", make_request(PROMPT, 12), [])
    outputs = [engine.step() for _ in range(3)]
    engine.submit("0/2", make_request(LONG, 4), [])
    outputs += run(engine)
    assert failed(outputs) == ["0/2"] and device_of(engine).num_failed == 1
    assert ids(outputs, "0/1") == fake_output(PROMPT, 12) and not ids(outputs, "0/2")
    assert_clean(engine)
    device_of(engine).most = 100
    engine.submit("0/3", make_request(LONG, 4), [])
    assert ids(run(engine), "0/3") == fake_output(LONG, 4)
    assert_clean(engine)


def test_where_there_are_but_decodes_they_end_and_who_waits_does_not(engine: Engine) -> None:
    engine.scheduler.config = SchedulerConfig(max_running=2)
    for i in range(3):
        engine.submit(f"0/{i}", make_request([*PROMPT, i], 12), [])
    outputs = [engine.step() for _ in range(3)]
    device_of(engine).most = 1
    outputs.append(engine.step())
    while not failed(outputs):
        outputs.append(engine.step())
    device_of(engine).most = 100
    outputs += run(engine)
    assert sorted(failed(outputs)) == ["0/0", "0/1"]
    assert ids(outputs, "0/2") == fake_output([*PROMPT, 2], 12)
    assert_clean(engine)


def test_what_is_cached_stays_so(engine: Engine) -> None:
    engine.submit("0/1", make_request(LONG, 1), [])
    run(engine)
    cached = set(engine.all_block_names())
    device_of(engine).most = 3
    engine.submit("0/2", make_request([*LONG, 1, 2, 3, 4], 4), [])
    outputs = run(engine)
    assert failed(outputs) == ["0/2"] and cached and set(engine.all_block_names()) == cached
    assert_clean(engine)


def test_a_prompt_that_is_handed_off_ends_so(engine: Engine) -> None:
    """The sink receives nothing of the KV that the step would have stored."""
    engine.submit("0/1", make_request(LONG, 30), [], handoff_id=HANDOFF)
    device_of(engine).most = 5
    output = engine.step()
    assert failed([output]) == ["0/1"]
    assert [type(event) for event in output.handoffs] == [HandoffEnded]
    engine.end_lease(HANDOFF)
    assert_clean(engine)


def test_a_running_one_that_is_handed_off_ends_so(engine: Engine) -> None:
    """A block that the step would have filled is leased already, and its sink would wait for it for ever."""
    engine.submit("0/1", make_request(PROMPT, 30), [])
    outputs = [engine.step(), engine.step()]
    engine.outgoing.offer("0/1", HANDOFF)
    while engine.steps:
        outputs.append(engine.step())
    engine.submit("0/2", make_request(LONG, 4), [])
    device_of(engine).most = 5
    outputs.append(engine.step())
    assert sorted(failed(outputs)) == ["0/1", "0/2"]
    events = [event for output in outputs for event in output.handoffs]
    assert isinstance(events[0], HandoffOpened) and isinstance(events[-1], HandoffEnded)
    engine.end_lease(HANDOFF)
    assert_clean(engine)


def test_what_was_put_off_until_the_step_was_over_is_done_though_it_failed() -> None:
    """A sink that has caught up while a step runs reports it only once."""
    engine = Engine(SmallDevice(looks_ahead=True, at_launch=False), SchedulerConfig(), clock=Clock())
    engine.submit("0/1", make_request(PROMPT, 30), [])
    engine.submit("0/2", make_request(PROMPT[:3], 30), [])
    outputs = [engine.step(), engine.step()]
    assert engine.steps
    ran: list[str] = []
    engine.steps.defer(lambda: ran.append("sealed"))
    device_of(engine).most = 1
    outputs.append(engine.step())
    assert sorted(failed(outputs)) == ["0/1", "0/2"] and ran == ["sealed"]
    assert_clean(engine)


def test_what_runs_provisionally_goes_on(engine: Engine) -> None:
    source = Engine(FakeRunner(), SchedulerConfig(), clock=Clock())
    move, request = Move(source, engine), make_request(PROMPT, 12)
    source.submit("0/1", request, [], handoff_id=HANDOFF)
    engine.submit("0/1", request, [], importing=True)
    outputs = move.hear([source.step()])
    granted = reserve(engine, "0/1", len(PROMPT))
    assert isinstance(granted, Reservation)
    move.reservation = granted
    move.begin()
    device_of(engine).most = 20
    engine.submit("0/2", make_request(LONG, 4), [])
    outputs += [engine.step(), engine.step()]
    assert failed(outputs) == ["0/2"]
    move.commit()
    outputs += run(engine)
    assert ids(outputs, "0/1") == fake_output(PROMPT, 12)
    assert_clean(engine)
    assert_clean(source)


def test_who_was_to_get_a_copy_ends_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the step that would have begun with the copy has no room for its tokens."""

    def too_little(_: object) -> None:
        raise OutOfDeviceMemory("too little memory")

    engine.submit("0/1", make_request(PROMPT, 9), [])
    engine.submit("0/2", make_request(LONG, 9), [])
    engine.submit("0/3", make_request(LONG, 9), [])
    outputs = [engine.step()]  # the last is parked until the second is computed: then it gets a copy of its last block
    monkeypatch.setattr(engine._runner, "copy_blocks", too_little)
    monkeypatch.setattr(Scheduler, "_add_chunk", lambda *_: None)
    while not failed(outputs):
        outputs.append(engine.step())
        assert len(outputs) < 5
    monkeypatch.undo()
    outputs += run(engine)
    assert failed(outputs) == ["0/3"]
    assert ids(outputs, "0/1") == fake_output(PROMPT, 9) and ids(outputs, "0/2") == fake_output(LONG, 9)
    assert_clean(engine)


@pytest.mark.parametrize("seed", range(30))
def test_whenever_it_strikes_tokens_are_right_and_blocks_come_back(engine: Engine, seed: int) -> None:
    numbers, outputs = random.Random(seed), list[StepOutput]()
    engine.scheduler.config = SchedulerConfig(chunk_tokens=numbers.choice([0, 8]), max_running=4)
    prompts = {f"0/{i}": [numbers.randint(1, 9)] * numbers.choice([3, 8, 8, 30]) for i in range(12)}
    waiting = list(prompts)
    while waiting or engine.scheduler.has_work or engine.steps:
        while waiting and numbers.random() < 0.4:
            key = waiting.pop()
            engine.submit(key, make_request(prompts[key], 7), [])
        device_of(engine).most = numbers.choice([1, 4, 20, 1000, 1000])
        outputs.append(engine.step())
        assert len(outputs) < 1000
    ended = set(failed(outputs))
    for key, prompt in prompts.items():
        found, whole = ids(outputs, key), fake_output(prompt, 7)
        assert found == (whole[: len(found)] if key in ended else whole)
    assert device_of(engine).num_failed
    assert_clean(engine)
