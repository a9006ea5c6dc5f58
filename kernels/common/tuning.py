"""Tables of launch configurations by device and size: frozen, looked up, never searched.

A kernel's file holds its `Tuned` table: for the devices on which it was measured, and a generic one for all others.
A lookup is pure and takes about a microsecond: it may stand on the request path and inside a graph's capture.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import torch

DEVICE_VARIABLE = "DIPTYCH_GPU"  # a name in CHIPS, used instead of the device's own name
ANY = math.inf
_THREADS = 2048  # that a core holds, of all that are named here

Config = TypeVar("Config")
Row = tuple[tuple[float, ...], Config]


@dataclass(frozen=True, slots=True)
class Chip:
    kinds: tuple[str, ...]  # its names, from the most specific to the most general
    num_cores: int  # streaming multiprocessors, or compute units
    shared_bytes: int  # that one program may have

    @property
    def has_fp8_products(self) -> bool:
        """Return whether it multiplies e4m3 by e4m3, as checkpoints have it: of NVIDIA's, sm_89 and later do."""
        numbers = [int(kind.removeprefix("sm_")) for kind in self.kinds if kind.startswith("sm_")]
        return self is INTERPRETER or max(numbers, default=0) >= 89

    def resident_programs(self, num_warps: int) -> int:
        """Return how many such programs the device holds at once, by threads alone: a persistent grid's size."""
        return self.num_cores * max(_THREADS // (32 * num_warps), 1)


CHIPS = {
    "l40s": Chip(("l40s", "sm_89", "sm_80"), 142, 99 * 1024),
    "a100": Chip(("a100", "sm_80", "cuda"), 108, 163 * 1024),
    "h100": Chip(("h100", "sm_90", "cuda"), 132, 227 * 1024),
    "h200": Chip(("h200", "h100", "sm_90", "cuda"), 132, 227 * 1024),
    "b200": Chip(("b200", "sm_100", "cuda"), 148, 227 * 1024),
    "mi300x": Chip(("mi300x", "gfx942", "hip"), 304, 64 * 1024),
}
# What interprets kernels: few cores, so that small tests split contexts and wrap grids as large ones do.
INTERPRETER = Chip(("interpreter",), 4, 64 * 1024)


class Tuned(Generic[Config]):
    """Rows of (limits, configuration) by kind of device: the first row with every size within its limit is taken.

    The last row of each table has no limits (ANY), and there is one for "generic": so every lookup ends in one.
    """

    def __init__(self, **tables: Sequence[Row[Config]]) -> None:
        assert "generic" in tables
        for rows in tables.values():
            assert rows and all(limit == ANY for limit in rows[-1][0])
            assert all(len(limits) == len(rows[-1][0]) for limits, _ in rows)
        self.tables = tables

    def of(self, chip: Chip, *sizes: float) -> Config:
        for limits, config in self._rows(chip):
            if all(size <= limit for size, limit in zip(sizes, limits, strict=True)):
                return config
        raise AssertionError("the last row has no limits")

    def limits(self, chip: Chip) -> list[float]:
        """Return the limits of its first size, ascending: beyond each there may be another configuration."""
        return sorted({limits[0] for limits, _ in self._rows(chip) if limits[0] != ANY})

    def _rows(self, chip: Chip) -> Sequence[Row[Config]]:
        return self.tables[next((kind for kind in chip.kinds if kind in self.tables), "generic")]


def nvidia_kinds(major: int, minor: int, shared_bytes: int) -> tuple[str, ...]:
    """Return the kinds of an NVIDIA GPU whose name is not known.

    The rows of "cuda" are for more shared memory than an A100 has. Those of "sm_80" suit the 99 KiB of workstation
    GPUs (sm_86, sm_89, sm_120).
    """
    return (f"sm_{major}{minor}", "cuda" if shared_bytes > CHIPS["a100"].shared_bytes else "sm_80")


@cache
def chip_of(device: torch.device) -> Chip:
    """Raises KeyError if DEVICE_VARIABLE names none of CHIPS."""
    named = os.environ.get(DEVICE_VARIABLE)
    if named:
        return CHIPS[named]
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
    if torch.version.hip:
        general = (properties.gcnArchName.split(":")[0], "hip")
    else:
        general = nvidia_kinds(properties.major, properties.minor, shared_bytes)
    name = properties.name.lower().replace(" ", "")
    kinds = next((chip.kinds for known, chip in CHIPS.items() if known in name), general)
    return Chip(kinds, properties.multi_processor_count, shared_bytes)
