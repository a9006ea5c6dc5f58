"""What a start prints, phase by phase."""

import io
import threading

import pytest
from rich.console import Console

from diptych.cluster.cli.progress import Progress

TIMEOUT_S = 30.0


class Output(io.StringIO):
    """Tells when a line has come."""

    def __init__(self) -> None:
        super().__init__()
        self._grew = threading.Condition()

    def write(self, text: str) -> int:
        with self._grew:
            written = super().write(text)
            self._grew.notify_all()
        return written

    def wait_for(self, words: str) -> None:
        with self._grew:
            assert self._grew.wait_for(lambda: words in self.getvalue(), TIMEOUT_S), self.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_phase_that_takes_long_says_what_it_waits_for(is_terminal: bool) -> None:
    output = Output()
    progress = Progress(Console(file=output, force_terminal=is_terminal, width=200), slow_s=0.01)
    with progress.phase("starting workers", "the supervisor starts") as phase:
        output.wait_for("the supervisor starts")  # while the phase itself is blocked
        phase.note("0 of 2 ready")
        output.wait_for(" s: 0 of 2 ready")
        phase.done = "2 workers are ready"
    assert "2 workers are ready" in output.getvalue().splitlines()[-1]


def test_a_phase_that_ends_soon_is_one_line() -> None:
    output = Output()
    with Progress(Console(file=output)).phase("checked the settings"):
        pass
    [line] = output.getvalue().splitlines()
    assert line.startswith("✓ checked the settings")


def test_a_phase_that_fails_prints_no_closing_line() -> None:
    output = Output()
    with pytest.raises(ValueError, match="wrong"), Progress(Console(file=output)).phase("checked the settings"):
        raise ValueError("wrong")
    assert output.getvalue() == ""
