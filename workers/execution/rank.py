"""Process of a worker's rank other than 0; rank_processes.py starts it.

    python -m diptych.workers.execution.rank SETTINGS

It does the work of rank_work.py, and ends when it is killed, when the worker's process is gone, or when another rank
does not do its part. It imports that without garbage collections, which would take a fifth of the time.
"""

import os
import signal
import sys
import traceback
from typing import NoReturn

from ..common.errors import DiptychError, RankLost
from ..common.garbage import importing
from ..common.parent_process import end_with_parent
from ..models.plan.rank_settings import RankSettings


def main(argv: list[str]) -> NoReturn:
    # A signal to the whole process group is for rank 0 to act on, which then ends us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = RankSettings.from_json(argv[1])
    life_line, go_line = os.dup(sys.stdout.fileno()), sys.stdin.fileno()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # NCCL, for example, logs to standard output
    try:
        end_with_parent()
        if os.getppid() != settings.parent_pid:
            raise RankLost("the worker of this rank has ended")
        with importing():
            from .rank_work import follow
        follow(settings, life_line, go_line)
    except DiptychError as e:
        print(f"error: rank {settings.rank}: {e}", file=sys.stderr)
    except Exception:  # noqa: BLE001 - whatever it is, the process ends
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # at once: communicators of GPUs end no sooner than the graphs that hold their calls


if __name__ == "__main__":
    main(sys.argv)
