"""How `serve` is ended by a signal, wherever that comes."""

import io
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from diptych.cluster.cli import launcher
from diptych.cluster.cli.launcher import Stopped, is_stop, serve
from diptych.cluster.common.config import ClusterConfig
from diptych.cluster.preflight.checks import SHIPPED_MODEL, resolve_model
from diptych.workers.common.errors import Unavailable


def raised_by(cause: BaseException) -> BaseException:
    """Exception that Ray makes of one that a signal handler raises within its calls."""
    with pytest.raises(SystemError) as found:
        raise SystemError("returned a result with an exception set") from cause
    return found.value


@pytest.mark.parametrize("error", [Stopped(), SystemExit(1), raised_by(Stopped()), raised_by(raised_by(Stopped()))])
def test_a_signal_within_a_call_of_ray_is_a_stop(error: BaseException) -> None:
    assert is_stop(error)


@pytest.mark.parametrize("error", [Unavailable("x"), raised_by(ValueError("x"))])
def test_an_error_is_no_stop(error: BaseException) -> None:
    assert not is_stop(error)


@pytest.mark.parametrize("moment", ["check", "crowding"])
def test_a_signal_before_ray_starts_is_answered(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launcher, moment, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    terminal = io.StringIO()
    with pytest.raises(Stopped):
        serve(ClusterConfig(model=resolve_model(SHIPPED_MODEL)), Console(file=terminal))
    assert terminal.getvalue().splitlines()[-1] == "stopping"
    assert not list(tmp_path.iterdir())
