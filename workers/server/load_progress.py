"""Progress bar on standard error while weights are read. Where that is no terminal: its last line alone."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextmanager
def load_progress(name: str) -> Generator[Callable[[int, int], None]]:
    """Yields what to call with (bytes read, bytes in all)."""
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def update(done: int, total: int) -> None:
            # The bar appears with the first bytes: a checkpoint that is refused has none.
            task = bar.task_ids[0] if bar.task_ids else bar.add_task(name, total=total)
            bar.update(task, completed=done)

        yield update
