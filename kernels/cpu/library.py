"""The compiled CPU kernels: the shared library, and the threads that compute with it. load.py loads the library.

A kernel `name` is the C function diptych_<name>_<isa> of src/: the library holds one for each instruction set, and the
best that this processor has is chosen when it is loaded. "amx" is "avx512bf16" with products by the matrix unit: its
kernels are the same, and what is packed says which instructions multiply it. Kernels take a Team first; while one runs,
Python's lock is free.
"""

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).parent / "diptych_cpu.so"
ISA_VARIABLE = "DIPTYCH_CPU_ISA"  # one of `Library.isas`, instead of the best; "none": compute with torch
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class StaleLibrary(Exception):
    """The compiled kernels are not those of these sources."""


class Library:
    def __init__(self, handle: ctypes.CDLL, isa: str) -> None:
        self.handle, self.isa = handle, isa
        self._kernels: dict[str, Any] = {}

    @property
    def isas(self) -> list[str]:
        """Instruction sets that it can be used with here, best first."""
        return available_isas(self.handle)

    @property
    def by_tiles(self) -> bool:
        """True where the processor's matrix unit multiplies what is packed (src/linear_tiles.h)."""
        return self.isa == "amx"

    def using(self, isa: str) -> "Library":
        assert isa in self.isas
        return Library(self.handle, isa)

    def kernel(self, name: str, *argtypes: Any) -> Any:
        """The function, given its argument types after the team; it returns nothing."""
        function = self._kernels.get(name)
        if function is None:
            isa = "avx512bf16" if self.by_tiles else self.isa
            function = self._kernels[name] = getattr(self.handle, f"diptych_{name}_{isa}")
            function.argtypes = (ctypes.c_void_p, *argtypes)
            function.restype = None
        return function


class Team:
    """Threads that compute steps together: the caller of a kernel and `num_threads` - 1 of their own.

    One kernel at a time. `cores`: where each active thread runs, the caller's first, which is left where it is.
    `num_active`: threads that compute until `resize`; default: all. The others sleep.
    """

    def __init__(
        self, library: Library, num_threads: int, cores: Sequence[int] | None = None, num_active: int | None = None
    ) -> None:
        num_active = num_active or num_threads
        assert 1 <= num_active <= num_threads and (cores is None or len(cores) == num_active)
        self.library, self.num_threads, self.num_active = library, num_threads, num_active
        handle = library.handle
        handle.diptych_team_create.restype = ctypes.c_void_p
        sizes = ctypes.c_int32(num_threads), ctypes.c_int32(num_active)
        self.address: int = handle.diptych_team_create(*sizes, _numbers(cores))
        self._end = weakref.finalize(self, handle.diptych_team_destroy, ctypes.c_void_p(self.address))
        self._end.atexit = False  # its threads end with the process

    def resize(self, cores: Sequence[int]) -> None:
        """Compute on one thread for each of `cores`, at most `num_threads`, from now on; call it between kernels.
        Results do not depend on it."""
        self.num_active = len(cores)
        assert 1 <= self.num_active <= self.num_threads
        address, size = ctypes.c_void_p(self.address), ctypes.c_int32(self.num_active)
        self.library.handle.diptych_team_resize(address, size, _numbers(cores))

    def close(self) -> None:
        """Idempotent."""
        self.address = 0
        self._end()


def _numbers(cores: Sequence[int] | None) -> "ctypes.Array[ctypes.c_int32] | None":
    return None if cores is None else (ctypes.c_int32 * len(cores))(*cores)


def available_isas(handle: ctypes.CDLL) -> list[str]:
    """Instruction sets that both the library and this processor have, best first."""
    return text_of(handle.diptych_isas).split()


def text_of(function: Any) -> str:
    """Text that a C function without arguments returns."""
    function.restype = ctypes.c_char_p
    return function().decode()
