"""Memory that asks for huge pages: transports read and write it several times faster. No torch."""

import mmap
import os
import sys

from .errors import ConfigError

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE; mmap has it since Python 3.13


def huge_page_mapping(num_bytes: int, remedy: str = "lower kv_memory_bytes", *, is_sparse: bool = False) -> mmap.mmap:
    """Map private memory. It holds zeros; pages that are never written cost no memory. is_sparse: few of them will be,
    so that there need not be as much memory. Raises ConfigError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NO_RESERVE if is_sparse else 0)
    try:
        return _with_huge_pages(mmap.mmap(-1, num_bytes, flags=flags))
    except OSError as e:
        raise _refused(num_bytes, e, remedy) from e


def shared_mapping(memory_fd: int, num_bytes: int) -> mmap.mmap:
    """Map the first `num_bytes` of a memory file, which is grown with zeros where it is smaller. Raises ConfigError.

    Which pages the kernel gives it depends on the file (kv/pool_file.py).
    """
    try:
        if os.fstat(memory_fd).st_size < num_bytes:
            os.ftruncate(memory_fd, num_bytes)
        return _with_huge_pages(mmap.mmap(memory_fd, num_bytes, flags=mmap.MAP_SHARED))
    except OSError as e:
        raise _refused(num_bytes, e, "lower kv_memory_bytes") from e


def _with_huge_pages(mapping: mmap.mmap) -> mmap.mmap:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return mapping  # a kernel without transparent huge pages: slower transfers, same bytes
    return mapping


def _refused(num_bytes: int, error: OSError, remedy: str) -> ConfigError:
    return ConfigError(f"{num_bytes:,} bytes of memory cannot be mapped ({error.strerror}): {remedy}")
