import mmap
import os
import platform
import subprocess
import sys
import threading

import pytest

from diptych.workers.kv import populate
from diptych.workers.kv.populate import PoolPopulator

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")
def test_memory_comes_before_the_blocks_that_are_used_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populate, "AHEAD_TOKENS", 8 * 16)
    fd = os.memfd_create("pool")
    os.ftruncate(fd, 33 * MIB)

    def populated() -> int:
        for thread in threading.enumerate():
            if thread.name == "diptych-populate":
                thread.join()
        return os.fstat(fd).st_blocks * 512 // MIB

    try:
        mapping = mmap.mmap(fd, 33 * MIB)
        pool = PoolPopulator(mapping, 32, MIB, 16)
        assert populated() == 8
        for block in range(4):
            pool.used(block)
        assert populated() == 8
        pool.used(4)
        assert populated() == 14
        for block in range(5, 32):
            pool.used(block)
        assert populated() == 32  # and not what is no block's
        assert mapping[:] == bytes(33 * MIB)
    finally:
        os.close(fd)


PATCHED = """
import ctypes, mmap, os, threading
from diptych.workers.kv.populate import PoolPopulator

threading.Thread.start = threading.Thread.run  # a thread that ends calls madvise for its stack
os.setpriority = lambda *priority: None  # for this thread does other work too
libc = ctypes.CDLL(None)
at = ctypes.cast(libc.madvise, ctypes.c_void_p).value
start = at // mmap.PAGESIZE * mmap.PAGESIZE
assert libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(2 * mmap.PAGESIZE), 7) == 0
fd = os.memfd_create("pool")
os.ftruncate(fd, 8 << 20)
mapping = mmap.mmap(fd, 8 << 20)
code = ctypes.string_at(at, 14)  # a far jump takes as many bytes
ctypes.memset(at, 0xCC, len(code))  # breakpoints
PoolPopulator(mapping, 8, 1 << 20, 16)
ctypes.memmove(at, code, len(code))
print(os.fstat(fd).st_blocks * 512 >> 20)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="it writes breakpoints into x86 code"
)
def test_a_function_that_ucx_patches_is_not_called() -> None:
    """UCX writes a jump over libc's `madvise` when NIXL opens: a thread that was in it would crash the worker."""
    run = subprocess.run([sys.executable, "-c", PATCHED], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "8"), run.stderr
