"""The roles of workers. No torch."""

from enum import Enum


class Role(Enum):
    """Use of a worker: a weight of its scheduler, changed at run time."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
