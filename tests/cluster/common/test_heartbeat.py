"""Heartbeats count checks without an answer, and end only the process that does not answer."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from rich.console import Console

from diptych.cluster.cli import launcher
from diptych.cluster.cli.progress import Progress
from diptych.cluster.common.config_file import build
from diptych.cluster.common.heartbeat import Heartbeat, Silence
from diptych.cluster.control.status import ClusterStatus, StartFailure
from diptych.cluster.placement.supervisor_calls import SupervisorClient, SupervisorGone
from diptych.workers.common.errors import ConfigError, Unavailable, WorkerLost

STATUS = ClusterStatus("default", "fake", 1, (), (), ())


def test_silence_is_of_looks_in_a_row_and_counts_anew_for_a_successor() -> None:
    silence = Silence(3)
    answers = [False, False, True, False, False, False, False, False, False]
    assert [silence.look(has_answered=answer) for answer in answers] == [False] * 5 + [True] + [False] * 2 + [True]


async def test_a_heartbeat_asks_one_call_at_a_time_and_an_error_is_no_answer() -> None:
    num_asked, answer = 0, asyncio.Event()

    async def ask() -> None:
        nonlocal num_asked
        num_asked += 1
        await answer.wait()
        if num_asked > 2:
            raise WorkerLost("it says that it cannot serve")

    heartbeat = Heartbeat(ask, 2)
    await asyncio.sleep(0)
    assert not heartbeat.look() and heartbeat.look() and num_asked == 1
    answer.set()
    for expected in (False, False, False, True):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert heartbeat.look() is expected
    heartbeat.close()


class Answers:
    """Results that a supervisor's client gets, in order."""

    def __init__(self, answers: Sequence[ClusterStatus | Unavailable]) -> None:
        self._answers = list(answers)
        self.num_restarts = 0

    def status(self, within_s: float) -> ClusterStatus:
        answer = self._answers.pop(0)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    def restart(self) -> None:
        self.num_restarts += 1


def watching(answers: Answers, console: Console) -> Any:
    made = launcher._Launcher(build({"model": "fake"}), console, Progress(console), launcher.StopSignals())
    made._supervisor = cast(SupervisorClient, cast(Any, answers))
    return made


def test_a_silent_supervisor_is_started_again_and_the_cluster_goes_on() -> None:
    silent = Unavailable("the supervisor did not answer within 8 s")
    num_silent = launcher.SILENT_LOOKS + 2 * launcher.STARTING_LOOKS  # it hangs, and so do two that follow
    answers = Answers([STATUS] + [silent] * num_silent + [STATUS, silent, STATUS])
    console = Console(record=True, force_terminal=False)
    watch = watching(answers, console)
    watch.is_ready = True
    seen = [watch._look() for _ in range(num_silent + 4)]
    assert seen == [STATUS] + [None] * num_silent + [STATUS, None, STATUS]
    assert answers.num_restarts == 3
    assert "it is started again; requests go on" in console.export_text()


def test_a_supervisor_that_starts_has_time_to_answer() -> None:
    answers = Answers([Unavailable("silent")] * (launcher.STARTING_LOOKS - 1) + [STATUS])
    watch = watching(answers, Console(quiet=True))
    assert [watch._look() for _ in range(launcher.STARTING_LOOKS)][-1] == STATUS
    assert answers.num_restarts == 0


def test_a_supervisor_that_was_ended_for_good_ends_serve() -> None:
    watch = watching(Answers([SupervisorGone("the supervisor was ended")]), Console(quiet=True))
    with pytest.raises(Unavailable, match="another process ended the cluster"):
        watch._look()


def test_looks_at_a_start_whose_supervisor_cannot_be_called_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    num_slept: list[float] = []
    monkeypatch.setattr(launcher.time, "sleep", num_slept.append)
    num_silent = 2 * launcher.STARTING_LOOKS
    ready = replace(STATUS, failure=StartFailure("ConfigError", "the end of the test"))
    console = Console(quiet=True)
    watch = watching(Answers([Unavailable("Ray does not answer")] * num_silent + [ready]), console)
    with pytest.raises(ConfigError), Progress(console).phase("starting") as phase:
        watch._wait_until_ready(phase)
    assert num_slept == [launcher.WATCH_S] * num_silent
