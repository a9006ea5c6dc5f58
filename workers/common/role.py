"""What a worker is used for. No torch."""

from enum import Enum


class Role(Enum):
    """What a worker is used for: a weight of its scheduler, changed at run time."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
