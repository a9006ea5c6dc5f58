"""Which machine this is, so that two processes can tell whether they share it. No torch."""

import platform
from functools import cache
from pathlib import Path

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def this_machine() -> str:
    """The kernel's name of its boot, which containers share; where there is none, the host's name and when it began."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return f"{platform.node()}/{psutil.boot_time():.0f}"
