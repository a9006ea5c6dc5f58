"""Rank hosts as real processes, for workers whose ranks are on several machines."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from diptych.workers.server.rank_host import main

from .forked import ForkedProcess, fork_command


@contextmanager
def rank_hosts(num: int = 1, **environ: str) -> Iterator[list[tuple[str, ForkedProcess]]]:
    """Start rank hosts; each with the address that it says. All have ended on leaving."""
    started = [fork_command(main, [], os.environ | {"OMP_NUM_THREADS": "1"} | environ) for _ in range(num)]
    try:
        yield [(json.loads(process.stdout.readline())["address"], process) for process in started]
    finally:
        for process in started:
            process.terminate()
        statuses = [process.wait(20) for process in started]
        for process in started:
            process.stdout.close()
        assert all(status in (0, -signal.SIGKILL) for status in statuses), statuses
