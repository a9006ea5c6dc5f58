"""Stands where a raylet wants an agent to be: says that the service is not in use, and waits for the raylet's end.

    python -I -S ray_agent.py SESSION_FOLDER NODE_ID PORT_NAME...

Imports little and no package: it is there within 20 ms, where Ray's own agents take a second of CPU each.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_IN_USE = "-1"  # Ray's agents write this for a service that is disabled


def main(folder: str, node_id: str, names: list[str]) -> None:
    end_with_parent()
    # Held open: by its files the session's processes are found (session_watchdog.py).
    held = [_announce(f"{folder}/{name}_{node_id}") for name in names]
    while held and os.getppid() != 1:
        signal.pause()


def end_with_parent() -> None:
    # As workers/common/parent_process.py does: this file imports no package.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _announce(path: str) -> int:
    descriptor = os.open(f"{path}.new", os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(descriptor, NOT_IN_USE.encode())
    os.rename(f"{path}.new", path)  # noqa: PTH104  pathlib takes as long as all the rest
    return descriptor


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
