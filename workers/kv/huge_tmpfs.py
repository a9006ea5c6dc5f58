"""A file of a tmpfs whose memory is in huge pages, whatever the system says of memory files. Linux only, no torch.

The tmpfs is mounted nowhere: it is reached by descriptors alone, and ends with the last of them. Mounting asks for
CAP_SYS_ADMIN. The kernel's calls have no wrappers in Python; their numbers are the same on all its newer architectures.
"""

import ctypes
import os
from contextlib import ExitStack

_OPEN_TREE, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 430, 431, 432, 442
_CLOEXEC = 1  # of fsopen, fsmount
_SET_STRING, _CREATE = 1, 6  # of fsconfig
_EMPTY_PATH, _TREE_CLONE = 0x1000, 1
_READ_ONLY = 1
_NAME = "kv"


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "namespace")]


def open_huge_file() -> tuple[int, int]:
    """Descriptors of a new file, empty and without a name: to write it, and to read it. The second is of a read-only
    mount: nobody can make it, or open it again as, one to write. Raises OSError where this may not be done."""
    with ExitStack() as stack:

        def closing(descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            return descriptor

        context = closing(_call(_FSOPEN, b"tmpfs", _CLOEXEC))
        for key, value in ((b"huge", b"always"), (b"size", b"0"), (b"mode", b"0700")):  # size: without a limit
            _call(_FSCONFIG, context, _SET_STRING, key, value, 0)
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        mount = closing(_call(_FSMOUNT, context, _CLOEXEC, 0))
        view = closing(_call(_OPEN_TREE, mount, b"", _EMPTY_PATH | _TREE_CLONE | os.O_CLOEXEC))
        attributes = _MountAttributes(set=_READ_ONLY)
        _call(_MOUNT_SETATTR, view, b"", _EMPTY_PATH, ctypes.byref(attributes), ctypes.sizeof(attributes))
        writable = os.open(_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=mount)
        with ExitStack() as unless_done:
            unless_done.callback(os.close, writable)
            readable = os.open(_NAME, os.O_RDONLY | os.O_CLOEXEC, dir_fd=view)
            unless_done.pop_all()
        os.unlink(_NAME, dir_fd=mount)
        return writable, readable


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    passed = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = libc.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
