"""Process that quantises a checkpoint: `python -m diptych.workers.quantize.command`. `diptych quantize` starts it.

standard input   a line with the job (QuantizeJob, JSON); it ends when the input closes, so with its parent
standard output  lines of JSON: {"note": what is done}, and at last {"done": what was made} or {"error", "code"}
"""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from typing import Any, NoReturn

import psutil

from ..common.errors import DiptychError
from ..common.exit_codes import INTERRUPTED, exit_code
from ..models.plan.quantize_job import QuantizeJob


def main() -> None:
    signal.signal(signal.SIGTERM, _stop)
    job = QuantizeJob.from_json(json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    from .job import quantise  # torch: the reason for this process

    available = psutil.virtual_memory().available
    if job.memory_bytes is not None:
        available = min(available, job.memory_bytes)
    try:
        made = quantise(job, available, lambda text: _say(note=text))
    except DiptychError as e:
        _say(error=e.message, code=exit_code(e))
        sys.exit(exit_code(e))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    _say(done=asdict(made))


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def _stop(*_: object) -> NoReturn:
    """End as an exception does, so that nothing is left of what was begun."""
    sys.exit(INTERRUPTED)


def _end_with_the_caller() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
