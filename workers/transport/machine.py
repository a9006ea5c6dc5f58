"""Name of the machine, container and user of this process: processes of one name can share memory. No torch."""

import os
import platform
from functools import cache
from pathlib import Path

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = Path("/proc/self/ns")


@cache
def this_machine() -> str:
    """Name of this boot of the kernel, or the host's name and when it began; with the namespaces and the user that a
    process must have in common with another one to read its memory. So containers of one machine are apart."""
    try:
        boot = BOOT_ID.read_text().strip()
        spaces = [str((NAMESPACES / kind).readlink()) for kind in ("pid", "user", "net")]
    except OSError:
        boot, spaces = f"{platform.node()}/{psutil.boot_time():.0f}", []
    return "/".join([boot, *spaces, str(os.geteuid())])
