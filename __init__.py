"""Diptych: disaggregated prefill/decode serving for large language models."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cluster.client.client import AsyncClient, Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> object:
    # The client needs grpc; a worker process that imports the package must not pay for it.
    if name in ("Client", "AsyncClient"):
        from .cluster.client import client

        return getattr(client, name)
    raise AttributeError(f"module 'diptych' has no attribute {name!r}")
