"""Packages that a server or a worker needs, and a client lacks: the extra `serve` of pyproject.toml. Imports none of
them."""

from collections.abc import Sequence
from importlib.util import find_spec

from ..common.errors import ConfigError

INSTALL = "pip install 'diptych[serve]'"
# By the name of the package: the module that it brings. NIXL and Triton are not here: a server runs without them.
SERVING = {
    "torch": "torch",
    "ray": "ray",
    "transformers": "transformers",
    "blake3": "blake3",
    "cryptography": "cryptography",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "safetensors": "safetensors",
    "sentencepiece": "sentencepiece",
    "starlette": "starlette",
    "tiktoken": "tiktoken",
    "uvicorn": "uvicorn",
}


def missing_to_serve(packages: Sequence[str] = tuple(SERVING)) -> list[str]:
    """Return those of `packages` that are not installed."""
    return [package for package in packages if not _is_installed(SERVING[package])]


def check_installed(what: str, packages: Sequence[str] = tuple(SERVING)) -> None:
    """Raises ConfigError where `what` needs one of `packages` and it is not installed."""
    if missing := missing_to_serve(packages):
        *others, last = missing
        names, verb = (f"{', '.join(others)} and {last}", "are") if others else (last, "is")
        raise ConfigError(
            f"{what} needs {names}, which {verb} not installed: `pip install diptych` installs what a client needs. "
            f"Run: {INSTALL}"
        )


def _is_installed(module: str) -> bool:
    # A folder of that name beside the caller is found too, as a namespace, which has no origin.
    spec = find_spec(module)
    return spec is not None and spec.origin is not None
