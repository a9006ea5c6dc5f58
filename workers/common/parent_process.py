"""Ends this process when its parent ends. Linux. No torch."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. A parent that ended before the call is
    not noticed: the caller compares os.getppid()."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
