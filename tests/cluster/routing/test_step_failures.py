"""The request that makes steps fail ends, its neighbours do not."""

import asyncio
import re
from collections.abc import Callable

import pytest

from diptych.cluster.routing.actions import Submit
from diptych.cluster.routing.failures import RequestFailures
from diptych.cluster.routing.router import Router
from diptych.workers.common.errors import DiptychError, RequestFailsSteps, StepFailed, StepFailedAlone, Unavailable
from diptych.workers.core.sequence import SampledToken
from diptych.workers.testing.fake_runner import FakeRunner, fake_output
from diptych.workers.testing.fake_stream import FakeStep

from ...support.state_harness import StateHarness
from .test_router_with_workers import CONFIG, Cluster, answer, cluster, prompts

BAD = 999
COMPANY, ALONE = StepFailed("a step failed"), StepFailedAlone("a step failed")


def test_a_step_that_fails_is_resumed_elsewhere() -> None:
    harness = StateHarness()
    harness.begin(None, "A")
    harness.token(1, 0)
    harness.failed(1, COMPANY)
    assert harness.told == [("forget", 1), ("choose", "")]
    assert harness.state.failures.workers == {"A"} and [s.worker for s in harness.state.failures.steps] == ["A"]
    harness.begin(None, "B")
    assert [s.output_token_ids for s in harness.log if isinstance(s, Submit)] == [(100,)]


def test_a_second_step_that_fails_with_it_alone_ends_it_by_name() -> None:
    harness = StateHarness()
    for handle, (worker, error) in enumerate((("A", COMPANY), ("B", ALONE)), 1):
        harness.begin(None, worker)
        harness.failed(handle, error)
    assert isinstance(harness.state.error, RequestFailsSteps) and not harness.state.error.retryable
    assert "request request made steps fail on A and B" in harness.state.error.message


def test_a_first_step_that_fails_with_it_alone_is_resumed_once() -> None:
    """The worker may be the cause: another one is asked."""
    harness = StateHarness()
    harness.begin(None, "A")
    harness.failed(1, ALONE)
    assert harness.told[-1] == ("choose", "")


def test_a_request_is_computed_alone_until_it_is_past_the_token_at_which_a_step_failed() -> None:
    """The worker had generated three tokens, of which none arrived: two more tokens alone would prove nothing."""
    harness = StateHarness()
    harness.begin(None, "A")
    harness.failed(1, StepFailed("a step failed", num_output=3))
    assert harness.state.failures.num_alone(0) == 5
    assert harness.state.failures.num_alone(3) == harness.state.failures.num_alone(4) == 2
    assert RequestFailures("request", 3).num_alone(0) == 0


def test_steps_that_fail_in_company_cost_an_attempt_only_where_the_request_has_come_no_further() -> None:
    harness = StateHarness(max_attempts=3)
    for handle, num_output in enumerate((0, 2, 4, 9), 1):
        harness.begin(None, f"W{handle}")
        harness.failed(handle, StepFailed("a step failed", num_output=num_output))
        assert harness.state.failures.num_attempts == 0 and harness.told[-1] == ("choose", "")
    for handle in range(5, 8):
        assert not harness.state.is_over
        harness.begin(None, f"W{handle}")
        harness.failed(handle, StepFailed("a step failed", num_output=9))
    assert type(harness.state.error) is Unavailable and "in 3 attempts" in harness.state.error.message
    assert "StepFailed" in harness.state.error.message


@pytest.mark.parametrize("speaks", [True, False])
def test_a_sinks_step_that_fails_counts_and_its_pull_from_a_source_whose_step_failed_does_not(speaks: bool) -> None:
    harness = StateHarness()
    harness.begin("P", "D")
    harness.token(1, 0)
    if speaks:
        harness.token(2, 1)
    harness.failed(2, COMPANY)
    assert [s.worker for s in harness.state.failures.steps] == ["D"]
    harness = StateHarness()
    harness.begin("P", "D")
    harness.failed(2, COMPANY, handoff=True)  # the source's error, reported through the sink
    harness.failed(1, COMPANY)
    assert [s.worker for s in harness.state.failures.steps] == ["P"] and harness.told[-1] == ("choose", "")


def test_a_decode_that_fails_alone_a_second_time_ends_the_source_too() -> None:
    harness = StateHarness()
    harness.begin(None, "A")
    harness.failed(1, COMPANY)
    harness.begin("P", "D")
    harness.token(2, 0)
    harness.failed(3, ALONE)
    assert ("abort", 2) in harness.told and isinstance(harness.state.error, RequestFailsSteps)


def fail_when(runner: FakeRunner, is_bad: Callable[[FakeStep], bool]) -> list[FakeStep]:
    """Have the steps raise that are bad. Returns these."""
    compute, failed = runner.stream._compute, list[FakeStep]()

    def maybe(step: FakeStep) -> list[SampledToken]:
        if is_bad(step):
            failed.append(step)
            raise RuntimeError("a kernel does not like it")
        return compute(step)

    runner.stream._compute = maybe
    return failed


def holds_bad_token(step: FakeStep) -> bool:
    return any(BAD in row.token_ids for row in step.rows)


async def outcome(router: Router, prompt: list[int], max_tokens: int) -> list[int] | DiptychError:
    try:
        return await answer(router, prompt, max_tokens)
    except DiptychError as e:
        return e


async def num_failed_steps(running: Cluster) -> list[int]:
    return [(await worker.settled_state()).load.num_failed_steps for worker in running.workers]


@pytest.mark.parametrize(
    "roles", [("mixed",), ("mixed",) * 3, ("prefill", "decode"), ("prefill",) * 2 + ("decode",) * 3], ids="+".join
)
async def test_one_raise_in_a_step_costs_no_request(roles: tuple[str, ...]) -> None:
    async with cluster(*roles, step_s=0.001) as running:
        failed = [fail_when(w.runner, lambda step: len(step.rows) > 3 and not any_failed()) for w in running.workers]

        def any_failed() -> bool:
            return any(failed)

        asked = prompts(16, 40, seed=5)
        found = await asyncio.gather(*(outcome(running.router, prompt, 12) for prompt in asked))
        assert found == [fake_output(prompt, 12) for prompt in asked]
        assert sum(await num_failed_steps(running)) == 1
        assert b"diptych_request_resumes_total 0.0" not in running.router.metrics()


@pytest.mark.parametrize(
    "roles", [("mixed",), ("mixed",) * 3, ("prefill", "decode"), ("prefill",) * 2 + ("decode",) * 3], ids="+".join
)
async def test_a_poison_request_ends_by_name_after_two_steps_and_its_neighbours_do_not(roles: tuple[str, ...]) -> None:
    async with cluster(*roles, step_s=0.001) as running:
        for worker in running.workers:
            fail_when(worker.runner, holds_bad_token)
        asked = prompts(15, 40, seed=6)
        asked = [[token for token in prompt if token != BAD] or [1] for prompt in asked]
        poison = [1, 2, BAD, 3]
        asked.insert(7, poison)
        found = await asyncio.gather(*(outcome(running.router, prompt, 12) for prompt in asked))
        for prompt, got in zip(asked, found, strict=True):
            if prompt is poison:
                assert isinstance(got, RequestFailsSteps) and "request-1" in got.message
            else:
                assert got == fake_output(prompt, 12)
        assert sum(await num_failed_steps(running)) == 2, "it walked through the fleet"


async def test_many_poison_requests_at_once_end_and_nobody_else_does() -> None:
    async with cluster("prefill", "prefill", "decode", "decode", step_s=0.001) as running:
        for worker in running.workers:
            fail_when(worker.runner, holds_bad_token)
        asked = [prompt if i % 4 else [BAD, i + 1] for i, prompt in enumerate(prompts(32, 40, seed=7))]
        found = await asyncio.gather(*(outcome(running.router, prompt, 12) for prompt in asked))
        for prompt, got in zip(asked, found, strict=True):
            assert isinstance(got, RequestFailsSteps) if BAD in prompt else got == fake_output(prompt, 12)


async def test_a_request_outlives_more_neighbours_that_make_its_steps_fail_than_it_has_attempts() -> None:
    async with cluster("mixed", step_s=0.001) as running:
        fail_when(running.workers[0].runner, holds_bad_token)
        prompt, max_tokens = [1, 2, 3], 60
        answered = asyncio.create_task(outcome(running.router, prompt, max_tokens))
        num_poison = 0
        while not answered.done():
            num_poison += 1
            assert isinstance(await outcome(running.router, [BAD, num_poison], 12), RequestFailsSteps)
        assert answered.result() == fake_output(prompt, max_tokens)
        metrics = running.router.metrics().decode()
        resumes = re.search(r"^diptych_request_resumes_total (\S+)$", metrics, re.MULTILINE)
        assert resumes is not None and float(resumes[1]) - num_poison > CONFIG.max_attempts


async def test_a_worker_whose_every_step_fails_takes_no_request_with_it() -> None:
    async with cluster("mixed", "mixed", step_s=0.001) as running:
        broken = running.workers[0]
        fail_when(broken.runner, lambda _: True)
        asked = prompts(12, 40, seed=8)
        answers = [asyncio.create_task(outcome(running.router, prompt, 12)) for prompt in asked]
        with pytest.raises(DiptychError, match="does not like it"):
            await broken.service.run(asyncio.Event())  # as its process does, which ends with that
        await running.lose(broken)
        assert await asyncio.gather(*answers) == [fake_output(prompt, 12) for prompt in asked]
