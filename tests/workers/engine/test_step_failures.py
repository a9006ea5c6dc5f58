"""A failed step: which sequences end, continue or are computed alone, and when the worker itself is the cause."""

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from diptych.workers.common.errors import DiptychError, StepFailed, StepFailedAlone
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.engine.thread import EngineThread
from diptych.workers.handoff.types import Reservation
from diptych.workers.testing.fake_runner import FakeRunner, fake_output
from diptych.workers.testing.fake_stream import FakeStep

from ...support.drafters import KnowingDrafter
from ...support.engines import HANDOFF, Move, assert_clean, reserve, run, tokens
from ...support.sequences import make_request

BAD = 999
PROMPT = [1, 2, 3, 5, 7, 11]


class Failing(FakeRunner):
    """A step raises that has one of `bad_tokens` in it, or every one."""

    def __init__(self, bad_tokens: Iterable[int] = (BAD,), *, looks_ahead: bool = False, block_size: int = 4) -> None:
        super().__init__(looks_ahead=looks_ahead, block_size=block_size)
        self.bad_tokens = frozenset(bad_tokens)
        self.fails_always = False
        self.keys: list[list[str]] = []  # of each step

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        self.keys.append([row.sequence.key for row in step.rows])
        if self.fails_always or any(self.bad_tokens.intersection(row.token_ids) for row in step.rows):
            raise RuntimeError("a kernel does not like it")
        return super()._compute(step)

    def steps_of(self, key: str) -> list[list[str]]:
        return [keys for keys in self.keys if key in keys]


def make(runner: FakeRunner, **config: int) -> Engine:
    return Engine(runner, SchedulerConfig(**config))


def step(engine: Engine) -> StepOutput:
    """As the engine's thread does it."""
    try:
        return engine.step()
    except RuntimeError as e:
        engine.step_failed(e)
        return StepOutput(0)


def run_through(engine: Engine) -> list[StepOutput]:
    outputs = [step(engine)]
    while engine.scheduler.has_work or engine.steps:
        outputs.append(step(engine))
    return [*outputs, engine.step()]


def failures(outputs: Iterable[StepOutput]) -> dict[str, type[DiptychError]]:
    return {failure.key: type(failure.error) for output in outputs for failure in output.failures}


def ids(outputs: list[StepOutput], key: str) -> list[int]:
    return [event.token_id for event in tokens(outputs, key)]


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_step_that_fails_ends_its_own_sequences_retryably_and_no_others(looks_ahead: bool) -> None:
    engine = make(Failing(looks_ahead=looks_ahead), max_running=2)
    engine.submit("0/1", make_request(PROMPT, 9), [])
    engine.submit("0/2", make_request([BAD, 1], 9), [])
    engine.submit("0/3", make_request([*PROMPT, 4], 9), [])  # waits
    outputs = run_through(engine)
    assert failures(outputs) == {"0/1": StepFailed, "0/2": StepFailed} and StepFailed.retryable
    assert ids(outputs, "0/3") == fake_output([*PROMPT, 4], 9)
    assert engine.check_integrity().load.num_failed_steps == 1
    assert_clean(engine)


def test_who_runs_but_was_not_in_the_step_goes_on() -> None:
    """A step of two tokens: one decodes, the other gives way to a chunk of the bad prompt."""
    engine = make(Failing(), chunk_tokens=1)
    for i in range(2):
        engine.submit(f"0/{i}", make_request([4 + i], 9), [])
    outputs = [step(engine)]
    engine.submit("0/2", make_request([1, BAD], 9), [])
    outputs.append(step(engine))
    engine.scheduler.config = SchedulerConfig(max_batch_tokens=2)
    outputs += run_through(engine)
    [innocent] = [key for key, error in failures(outputs).items() if key != "0/2" and error is StepFailed]
    other = 1 - int(innocent.removeprefix("0/"))
    assert failures(outputs) == {innocent: StepFailed, "0/2": StepFailed}
    assert ids(outputs, f"0/{other}") == fake_output([4 + other], 9)
    assert_clean(engine)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_suspect_is_computed_alone_until_it_has_made_two_tokens(looks_ahead: bool) -> None:
    runner = Failing((), looks_ahead=looks_ahead)
    engine = make(runner, chunk_tokens=4)
    for i in range(3):
        engine.submit(f"0/{i}", make_request([*PROMPT, i], 12), [])
    outputs = [engine.step()]
    suspects = {"0/7": [8] * 9, "0/8": [9] * 9}
    for key, prompt in suspects.items():
        engine.submit(key, replace(make_request(prompt, 12), num_alone=2), [])
    outputs += run(engine)
    for key, prompt in suspects.items():
        steps = runner.steps_of(key)
        assert steps[:4] == [[key]] * 4  # three chunks, of which the last gives a token, and a decode
        assert any(len(step) > 1 for step in steps[4:])
        assert ids(outputs, key) == fake_output(prompt, 12)
    for i in range(3):
        assert ids(outputs, f"0/{i}") == fake_output([*PROMPT, i], 12)
    num_shared = max(i for i, keys in enumerate(runner.keys) if "0/0" in keys)
    alone = [len(keys) == 1 and keys[0] in suspects for keys in runner.keys[:num_shared]]
    assert not any(a and b for a, b in pairwise(alone)), "the others wait for two steps in a row"
    assert_clean(engine)


def test_a_suspect_that_fails_alone_says_so_and_its_neighbours_do_not_notice() -> None:
    engine = make(Failing())
    for i in range(3):
        engine.submit(f"0/{i}", make_request([*PROMPT, i], 12), [])
    outputs = [engine.step()]
    engine.submit("0/7", replace(make_request([BAD, 1], 9), num_alone=2), [])
    outputs += run_through(engine)
    assert failures(outputs) == {"0/7": StepFailedAlone}
    for i in range(3):
        assert ids(outputs, f"0/{i}") == fake_output([*PROMPT, i], 12)
    assert_clean(engine)


def test_a_suspect_whose_kv_comes_from_another_worker_is_computed_alone_too() -> None:
    source, runner = make(FakeRunner()), Failing(())
    sink = make(runner)
    sink.submit("0/9", make_request(PROMPT, 30), [])
    outputs = [sink.step()]
    request = replace(make_request([4, 5, 6, 7, 8], 12), num_alone=2)
    source.submit("0/1", request, [], handoff_id=HANDOFF)
    sink.submit("0/1", request, [], importing=True)
    move = Move(source, sink)
    first = ids(move.hear([source.step()]), "0/1")
    reservation = reserve(sink, "0/1", len(request.prompt_token_ids))
    assert isinstance(reservation, Reservation)
    move.reservation = reservation
    move.commit()
    outputs += run(sink)
    assert first + ids(outputs, "0/1") == fake_output([4, 5, 6, 7, 8], 12)
    assert runner.steps_of("0/1")[:2] == [["0/1"], ["0/1"]] and len(runner.steps_of("0/1")[2]) == 2
    assert_clean(sink)


def test_a_preempted_suspect_comes_back_alone() -> None:
    """The oldest grows at the cost of the youngest, which is the suspect."""
    runner = Failing(())
    engine = Engine(runner, SchedulerConfig(chunk_tokens=2), prefix_cache=False)
    engine.manager.allocate(runner.memory.num_blocks - 6)
    engine.submit("0/1", make_request([1] * 11, 12), [])
    outputs = [engine.step() for _ in range(6)]
    engine.submit("0/2", replace(make_request([2] * 12, 3), num_alone=2), [])
    outputs += run(engine)
    assert engine.scheduler.num_preemptions == 1
    assert ids(outputs, "0/1") == fake_output([1] * 11, 12) and ids(outputs, "0/2") == fake_output([2] * 12, 3)


def serve(runner: Failing, requests: int) -> tuple[list[StepOutput], list[DiptychError]]:
    """An engine's thread computes this many requests one after another, and the last one succeeds."""
    outputs: list[StepOutput] = []
    broken: list[DiptychError] = []
    heard = threading.Event()

    def listen(output: StepOutput) -> None:
        outputs.append(output)
        if output.failures or any(token.finish for token in output.tokens):
            heard.set()

    def end(error: DiptychError) -> None:
        broken.append(error)
        heard.set()

    thread = EngineThread(Engine(runner, SchedulerConfig()), listen, end)
    thread.start()
    for i in range(requests):
        prompt = PROMPT if i == requests - 1 else [BAD, i + 1]
        heard.clear()
        thread.post(lambda engine, i=i, prompt=prompt: engine.submit(f"0/{i}", make_request(prompt, 3), []))
        assert heard.wait(60)
        if broken:
            break
    asyncio.run(asyncio.to_thread(thread.stop))
    return outputs, broken


def test_requests_that_fail_one_after_the_other_do_not_end_a_worker_that_computes() -> None:
    outputs, broken = serve(Failing(), requests=8)
    assert not broken and failures(outputs) == {f"0/{i}": StepFailedAlone for i in range(7)}
    assert ids(outputs, "0/7") == fake_output(PROMPT, 3)


def test_a_worker_whose_every_step_fails_ends_and_says_why() -> None:
    runner = Failing()
    runner.fails_always = True
    outputs, broken = serve(runner, requests=1)
    assert "does not like it" in broken[0].message
    assert not failures(outputs), "the requests are lost with their worker: it is not they who failed"


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_the_self_test_fits_any_block_size_and_leaves_nothing(block_size: int) -> None:
    engine = make(Failing(block_size=block_size))
    engine.submit("0/1", make_request([BAD, 1], 9), [])
    assert failures(run_through(engine)) == {"0/1": StepFailedAlone}
    assert_clean(engine)


def test_books_that_do_not_add_up_after_a_failure_end_the_worker() -> None:
    engine = make(Failing())
    engine.submit("0/1", make_request([BAD, 1], 9), [])
    with pytest.raises(RuntimeError) as raised:
        engine.step()
    engine.manager.allocate(1)  # not referenced by any sequence
    with pytest.raises(DiptychError, match="unaccounted"):
        engine.step_failed(raised.value)


def test_a_step_may_have_failed_by_any_token_of_a_draft() -> None:
    """Else the request would be back among others before it reaches the token that fails them."""
    runner = Failing(bad_tokens=fake_output(PROMPT, 5)[4:])
    engine = Engine(runner, SchedulerConfig(), drafter=KnowingDrafter(num_tokens=4))
    engine.submit("0/1", make_request(PROMPT, 9), [])
    (failure,) = [failure for output in run_through(engine) for failure in output.failures]
    assert isinstance(failure.error, StepFailed)
    assert failure.error.num_output == 1 + 4  # the prompt's step yielded one; the draft had the fifth
