"""Gets the memory of a KV pool from the kernel before its blocks are written. Linux only, no torch.

A pool's pages cost nothing until they are written. The first write of one waits until the kernel has found and cleared
it, and the step waits with it: 2 MB take some 0.1 ms, and 5 ms in a virtual machine whose host does the same. So a
thread of low priority populates the pages of the blocks that are used next: those that never were are used in ascending
order (BlockManager.on_first_use). It begins when the pool is made.

It has not the priority of an idle thread: between two pieces it holds Python's lock, for which the whole worker waits,
and where other processes compute on all cores an idle one then gets none for a second.

It calls the kernel by libc's `syscall`, not by its `madvise`: when NIXL opens, UCX writes a jump over the first bytes
of that function, and a thread that comes back from the kernel then goes on in the middle of the jump.
"""

import ctypes
import logging
import mmap
import os
import platform
import threading
from contextlib import suppress

AHEAD_TOKENS = 32_768  # of the KV whose memory is there before it is needed
PAGE_BYTES = 2 << 20  # of a huge page
NICE = 10  # a tenth of a core that others compute on
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python does not name it
MADVISE = {"x86_64": 28, "aarch64": 233}.get(platform.machine())  # number of the system call

log = logging.getLogger("diptych.kv")


class PoolPopulator:
    """Populates a mapping that begins with blocks of `block_bytes`, one behind the other. Each thread ends with its
    part."""

    def __init__(self, mapping: mmap.mmap, num_blocks: int, block_bytes: int, block_size: int) -> None:
        """block_size: in tokens."""
        self._mapping = mapping  # which lives as long as a thread populates it
        self._num_bytes, self._block_bytes = num_blocks * block_bytes, block_bytes
        self._ahead = AHEAD_TOKENS // block_size * block_bytes
        self._end = 0  # of what is populated, or will be
        self._populate_to(self._ahead)

    def used(self, block: int) -> None:
        """Note that a block is used for the first time; all before it were."""
        needed = (block + 1) * self._block_bytes
        if self._end < min(needed + self._ahead // 2, self._num_bytes):
            self._populate_to(needed + self._ahead)

    def _populate_to(self, end: int) -> None:
        start, self._end = self._end, min(-(-end // PAGE_BYTES) * PAGE_BYTES, self._num_bytes)
        threading.Thread(target=self._populate, args=(start, self._end), name="diptych-populate", daemon=True).start()

    def _populate(self, start: int, end: int) -> None:
        with suppress(OSError):  # a system where threads have no priorities of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        if MADVISE is None:
            return
        syscall = ctypes.CDLL(None, use_errno=True).syscall  # unlike the mapping's madvise, it lets other threads run
        syscall.restype = ctypes.c_long
        number, advice = ctypes.c_long(MADVISE), ctypes.c_long(MADV_POPULATE_WRITE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        for offset in range(start, end, PAGE_BYTES):
            num_bytes = ctypes.c_size_t(min(PAGE_BYTES, end - offset))
            if syscall(number, ctypes.c_void_p(base + offset), num_bytes, advice):
                log.debug("the KV pool's memory comes when it is written: %s", os.strerror(ctypes.get_errno()))
                return
