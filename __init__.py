"""Diptych: disaggregated prefill/decode serving for large language models."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cluster.client.client import AsyncClient, Client

    __version__: str

__all__ = ["AsyncClient", "Client", "__version__"]


def _version() -> str:
    """Return the version of the installed package, or of the source tree where it is not installed. Only pyproject.toml
    states it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("diptych")
    except PackageNotFoundError:
        import tomllib
        from pathlib import Path

        project = Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8")
        return tomllib.loads(project)["project"]["version"]


def __getattr__(name: str) -> object:
    # Each costs an import that a worker process must not pay for when it imports the package: grpc, importlib.metadata.
    if name in ("Client", "AsyncClient"):
        from .cluster.client import client

        return getattr(client, name)
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'diptych' has no attribute {name!r}")
