"""Start-up, phase by phase with timings: a spinner on a terminal, one plain line a phase anywhere else.

A phase that takes longer than expected says what it waits for: after SLOW_S, and again whenever it has taken twice as
long. A thread says it, for the phase may be blocked.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

SLOW_S = 10.0


class StartPhase:
    """`note` says what the phase waits for; `done` is the line that stays."""

    def __init__(self, title: str, waits_for: str, show: Callable[[str], None]) -> None:
        self.title = title
        self.done = title
        self.waits_for = waits_for
        self._show = show

    def note(self, text: str) -> None:
        self.waits_for = text
        self._show(f"{self.title}: {text}")


class Progress:
    def __init__(self, console: Console, *, slow_s: float = SLOW_S) -> None:
        self._console = console
        self._slow_s = slow_s
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @contextmanager
    def phase(self, title: str, waits_for: str = "not done yet") -> Generator[StartPhase]:
        """Show a phase; print its closing line only if it succeeds. `waits_for`: what it waits for, until `note`
        replaces it."""
        began = time.monotonic()
        status = self._console.status(title) if self._console.is_terminal else None
        phase = StartPhase(title, waits_for, (lambda text: status.update(Text(text))) if status else lambda _: None)
        over = threading.Event()
        watcher = threading.Thread(target=self._say_what_it_waits_for, args=(phase, over), daemon=True)
        watcher.start()
        if status:
            status.start()
        try:
            yield phase
        finally:
            over.set()
            watcher.join()
            if status:
                status.stop()
        took = f"{time.monotonic() - began:.1f} s"
        self._console.print(Text.assemble(("✓ ", "green"), phase.done, (f"  {took}", "dim")), soft_wrap=True)

    def _say_what_it_waits_for(self, phase: StartPhase, over: threading.Event) -> None:
        after_s = self._slow_s
        elapsed_s = 0.0
        while not over.wait(after_s - elapsed_s):
            elapsed_s, after_s = after_s, 2 * after_s
            text = f"{phase.title} for {elapsed_s:g} s: {phase.waits_for}"
            self._console.print(Text(text, style="dim"), soft_wrap=True)
