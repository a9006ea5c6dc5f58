"""How `serve` is ended by a signal, wherever that comes."""

import pytest

from diptych.cluster.cli.launcher import Stopped, is_stop
from diptych.workers.common.errors import Unavailable


def raised_by(cause: BaseException) -> BaseException:
    """As Ray makes of what a signal handler raises within its calls."""
    with pytest.raises(SystemError) as found:
        raise SystemError("returned a result with an exception set") from cause
    return found.value


@pytest.mark.parametrize("error", [Stopped(), SystemExit(1), raised_by(Stopped()), raised_by(raised_by(Stopped()))])
def test_a_signal_within_a_call_of_ray_is_a_stop(error: BaseException) -> None:
    assert is_stop(error)


@pytest.mark.parametrize("error", [Unavailable("x"), raised_by(ValueError("x"))])
def test_an_error_is_no_stop(error: BaseException) -> None:
    assert not is_stop(error)
