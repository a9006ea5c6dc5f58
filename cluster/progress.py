"""Start-up, phase by phase with timings: a spinner on a terminal, one plain line a phase anywhere else."""

import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Phase:
    """`note` says what the phase is waiting for; `done` is the line that stays."""

    def __init__(self, title: str, status: Status | None) -> None:
        self._title = title
        self._status = status
        self.done = title

    def note(self, text: str) -> None:
        if self._status:
            self._status.update(Text(f"{self._title}: {text}"))


class Progress:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @contextmanager
    def phase(self, title: str) -> Generator[Phase]:
        """One phase; its closing line is printed only if it ends well."""
        began = time.monotonic()
        status = self._console.status(title) if self._console.is_terminal else None
        phase = Phase(title, status)
        if status:
            status.start()
        try:
            yield phase
        finally:
            if status:
                status.stop()
        took = f"{time.monotonic() - began:.1f} s"
        self._console.print(Text.assemble(("✓ ", "green"), phase.done, (f"  {took}", "dim")), soft_wrap=True)
