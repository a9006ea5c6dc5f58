"""Memory file of a KV pool: this worker's processes write it, other processes of its user map it read-only. No torch.

    make -> map, in each process that writes -> seal -> `reader_fd` may go to others

Attention and copies are faster in huge pages. They come from the first of these that the machine offers:

    reserved      a memfd in pages that were set aside (vm.nr_hugepages); all of it is taken at once
    transparent   a memfd, where the system gives memory files huge pages (shmem_enabled)
    mounted       a file of a tmpfs of our own (huge_tmpfs.py), where we may mount one
    small         a memfd in small pages
"""

import fcntl
import logging
import mmap
import os
import sys
import weakref
from contextlib import suppress
from pathlib import Path

from ..common.memory import shared_mapping
from .huge_tmpfs import open_huge_file

TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage")
MEMINFO = Path("/proc/meminfo")
F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python 3.11 does not name it
NAME = "diptych-kv"
SHARED_MEMORY = "shared_memory"  # name of the transport by which others read such a file

log = logging.getLogger("diptych.kv")


class PoolFile:
    """Owns two descriptors: `fd` to write, until it is sealed, and `reader_fd`, which can only read."""

    def __init__(self, fd: int, reader_fd: int, pages: str) -> None:
        self.fd, self.reader_fd, self.pages = fd, reader_fd, pages
        self._close_writer = weakref.finalize(self, os.close, fd)
        weakref.finalize(self, os.close, reader_fd)

    @classmethod
    def make(cls, num_bytes: int | None, *, small_pages: bool) -> "PoolFile | None":
        """Make a file of that many bytes or a little more; None: of none, `map` makes it larger. Returns None where
        there are only small pages and `small_pages` are not wanted, or no memory files at all."""
        if sys.platform != "linux":
            return None
        file = _reserved(num_bytes) or (_of_memfd("transparent") if _gives_huge_pages("shmem_enabled") else _mounted())
        if file is None and small_pages:
            file = _of_memfd("small")
        if file is not None:
            log.info("the KV pool is a memory file, pages: %s", file.pages)
        return file

    def map(self, num_bytes: int) -> mmap.mmap:
        """Map the file to write, `num_bytes` or what it has more. Raises ConfigError."""
        return shared_mapping(self.fd, max(num_bytes, os.fstat(self.fd).st_size))

    def seal(self) -> None:
        """Fix the size, and keep others than those who have it mapped from writing. Idempotent."""
        if self._close_writer.alive:
            if self.pages != "mounted":  # whose reader is read-only already, and whose files cannot be sealed
                _seal(self.fd)
            self._close_writer()


def anonymous_has_huge_pages() -> bool:
    """Tell whether private memory that asks for huge pages may get them."""
    return _gives_huge_pages("enabled")


def is_fixed(fd: int) -> bool:
    """Tell whether this memory file can get no shorter while others have it mapped."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return True
    except OSError:
        return False  # no memory file
    return bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)


def _seal(fd: int) -> None:
    size_seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size_seals)
    with suppress(OSError):  # an older kernel: the descriptor that is handed out cannot write anyway
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def _of_memfd(pages: str, flags: int = 0) -> PoolFile:
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    return PoolFile(fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), pages)


def _reserved(num_bytes: int | None) -> PoolFile | None:
    """Make a file that has all its pages: one that a control group refuses later would end the process."""
    if num_bytes is None:
        return None
    found = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    if "HugePages_Free" not in found:
        return None
    num_free = int(found["HugePages_Free"]) - int(found["HugePages_Rsvd"])
    page_bytes = int(found["Hugepagesize"].split()[0]) << 10
    num_pages = -(-num_bytes // page_bytes)
    if num_pages > num_free:
        return None
    try:
        file = _of_memfd("reserved", os.MFD_HUGETLB)
        os.posix_fallocate(file.fd, 0, num_pages * page_bytes)
    except OSError as e:
        log.info("the huge pages that are set aside cannot be had: %s", e)
        return None
    return file


def _mounted() -> PoolFile | None:
    try:
        return PoolFile(*open_huge_file(), "mounted")
    except OSError as e:
        log.debug("no tmpfs with huge pages can be mounted: %s", e)
        return None


def _gives_huge_pages(file: str) -> bool:
    """Read what the system says in a file of TRANSPARENT, first for huge pages of the usual size."""
    said = [_chosen(path) for path in (TRANSPARENT / "hugepages-2048kB" / file, TRANSPARENT / file)]
    return next((mode for mode in said if mode not in ("", "inherit")), "never") not in ("never", "deny")


def _chosen(path: Path) -> str:
    """The word in brackets."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""
