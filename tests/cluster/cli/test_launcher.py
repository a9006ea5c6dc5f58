"""How `serve` is ended by a signal, wherever that comes."""

import asyncio
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from diptych.cluster.cli import launcher
from diptych.cluster.cli.launcher import StopSignals, serve
from diptych.cluster.cli.progress import Progress
from diptych.cluster.common.config import ClusterConfig
from diptych.cluster.control.status import ClusterStatus
from diptych.cluster.preflight.checks import SHIPPED_MODEL, resolve_model
from diptych.workers.common.errors import Unavailable


def raised_by(cause: BaseException) -> BaseException:
    """Exception that Ray makes of one that a signal handler raises within its calls."""
    with pytest.raises(SystemError) as found:
        raise SystemError("returned a result with an exception set") from cause
    return found.value


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signals = StopSignals()
    signals.install()
    yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("error", [SystemExit(1), raised_by(SystemExit(1)), raised_by(raised_by(SystemExit(1)))])
def test_a_signal_of_which_ray_makes_another_error_is_a_stop(signals: StopSignals, error: BaseException) -> None:
    assert signals.is_cause_of(error)


@pytest.mark.parametrize("error", [Unavailable("x"), raised_by(ValueError("x"))])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_error_is_a_stop_if_a_signal_has_come(signals: StopSignals, error: BaseException, number: int) -> None:
    assert not signals.is_cause_of(error)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    assert signals.is_cause_of(error)


def test_a_second_signal_does_not_interrupt_the_end(signals: StopSignals) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)


def test_asyncio_passes_a_signal_on(signals: StopSignals) -> None:
    """One that comes within a callback is logged by asyncio, and its loop goes on, unless it is a KeyboardInterrupt."""

    async def wait() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(wait())


def test_a_signal_that_a_library_swallows_is_answered_by_the_next_look(signals: StopSignals) -> None:
    config, console = ClusterConfig(model=resolve_model(SHIPPED_MODEL)), Console(file=io.StringIO())
    launching = launcher._Launcher(config, console, Progress(console), signals)
    launching._supervisor = Swallowing()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), Progress(console).phase("starting workers", "all") as phase:
        launching._wait_until_ready(phase)
    assert launching._supervisor.num_asked == 1  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        signals.install()


class Swallowing:
    """A supervisor whose call is interrupted by a signal, which becomes an error by name."""

    num_asked = 0

    def status(self, within_s: float) -> ClusterStatus:
        self.num_asked += 1
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt as e:
            raise Unavailable("the supervisor is gone") from e
        raise AssertionError("it was not interrupted")


@pytest.mark.parametrize("moment", ["check", "crowding"])
def test_a_signal_before_ray_starts_is_answered(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launcher, moment, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    terminal = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        serve(ClusterConfig(model=resolve_model(SHIPPED_MODEL)), Console(file=terminal))
    assert terminal.getvalue().splitlines()[-1] == "stopping"
    assert not list(tmp_path.iterdir())
