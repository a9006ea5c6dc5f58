"""What the tests of several machines share: how Ray is started on them, and a load from one of them."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..support.machines import END_S, ROOT, Lan, Popen, end

API_KEY = "the key of the clients"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
START_S = 600.0


class Requests:
    """A load from the clients' machine."""

    def __init__(self, process: Popen) -> None:
        self._process = process

    def until_done(self, number: int) -> None:
        """Wait until so many more have ended. None may have failed."""
        told = self._ask(f"{number}")
        assert not told["errors"] and told["num_done"] >= number

    def forget_gaps(self) -> dict[str, float]:
        """Return the longest times since the last call, in s: `gap`, between two pieces of one answer; `silence`, in
        which no client was sent anything."""
        told = self._ask("forget")
        return {"gap": told["gap_s"], "silence": told["silence_s"]}

    def _ask(self, line: str) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        return json.loads(self._process.stdout.readline())


@contextmanager
def load(site: Lan, host: str) -> Iterator[Requests]:
    """Requests to the router on the machine with the address `host`, from the first machine."""
    command = [sys.executable, "-m", "tests.support.load_process", f"{host}:50051", API_KEY]
    with site.machines[0].start(command, cwd=ROOT) as process:
        try:
            yield Requests(process)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(END_S)
        finally:
            end(process)
