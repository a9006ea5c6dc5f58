import mmap
import os
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
