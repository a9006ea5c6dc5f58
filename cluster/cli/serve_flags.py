"""Flags of `diptych serve`: one for each setting of the workers (workers/config), and those of the cluster itself."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...workers.common.errors import ConfigError
from ...workers.common.settings import Scope
from ...workers.config.worker_config import SETTINGS, Setting
from ..common.config_file import KEY_VARIABLES

# Other names of flags: for --kv-memory-bytes 2GiB, and one --transport for each item.
ALIASES = {"kv_memory_bytes": "--kv-memory", "transports": "--transport"}
TLS_FILES = {
    "ca": "PEM file of the authority of the processes' certificates.",
    "cert": "PEM certificate that every process shows to the others.",
    "key": "PEM key of that certificate.",
}
FLAGS = {name: setting for name, setting in SETTINGS.items() if setting.scope is not Scope.PROCESS and name != "model"}


def parameters() -> list[inspect.Parameter]:
    """Parameters of the command, in the order of its help."""
    own = [
        _parameter("model", str, typer.Argument(help="Folder of a Hugging Face checkpoint, a GGUF file, or `tiny`.")),
        _parameter("prefill", int, typer.Option(help="Prefill workers.  [default: 1]")),
        _parameter("decode", int, typer.Option(help="Decode workers.  [default: 1]")),
        _parameter("mixed", int, typer.Option(help="Workers that do both.  [default: 0]")),
        _parameter("config", Path, typer.Option(help="cluster.yaml; flags win over it.")),
        _parameter("name", str, typer.Option(help="The cluster's name.  [default: default]")),
        _parameter("host", str, typer.Option(help="Where the front door listens.  [default: 127.0.0.1]")),
        _parameter("http_port", int, typer.Option(help="0: any free port.  [default: 8000]")),
        _parameter("grpc_port", int, typer.Option(help="0: any free port.  [default: 50051]")),
        _parameter(
            "api_key",
            str,
            typer.Option(
                envvar=KEY_VARIABLES["api_key"],
                help="Asked of every client. Other users of this machine can read a flag: use the variable, or a file.",
            ),
        ),
        _parameter("api_key_file", Path, typer.Option(help="File of the API key; wins over --api-key.")),
        _parameter("api_keys_file", str, typer.Option(help="File of several API keys, with names.")),
        _parameter("strict", bool, typer.Option(help="Refuse requests with unknown fields.  [default: ignore]")),
        _parameter("tool_parser", str, typer.Option(help="Format of the model's calls of tools.  [default: auto]")),
        _parameter("reasoning_parser", str, typer.Option(help="Marks of the model's thoughts.  [default: auto]")),
        _parameter("cores", int, typer.Option(help="Cores that each worker is bound to; 0: none.")),
        _parameter("tls", str, typer.Option(help="off, or auto: TLS between the cluster's processes.  [default: off]")),
        *(_parameter(f"tls_{name}", str, typer.Option(help=text)) for name, text in TLS_FILES.items()),
        _parameter("dashboard", bool, typer.Option(help="Start Ray's dashboard, on loopback.")),
    ]
    return own + [_parameter_of(setting) for setting in FLAGS.values()]


def given_to_workers(flags: Mapping[str, Any], *, every_pool: bool) -> dict[str, Any]:
    """The workers' settings among the flags: those of every pool, or those of the cluster. None: not given."""
    return {
        name: flags[name] or None if setting.is_list else flags[name]
        for name, setting in FLAGS.items()
        if (setting.scope is Scope.POOL) == every_pool
    }


def tls_of(flags: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The setting `tls`; None: not given. Raises ConfigError."""
    word, files = flags["tls"], {name: flags[f"tls_{name}"] for name in TLS_FILES if flags[f"tls_{name}"]}
    if word and files:
        raise ConfigError("--tls and files of TLS exclude each other: leave out --tls, or --tls-ca, -cert and -key")
    return files or word


def _parameter_of(setting: Setting) -> inspect.Parameter:
    names = [f"{setting.flag}/--no-{setting.flag[2:]}" if setting.flag_type is bool else setting.flag]
    names += [ALIASES[setting.name]] if setting.name in ALIASES else []
    kind = list[setting.flag_type] if setting.is_list else setting.flag_type
    return _parameter(setting.name, kind, typer.Option(*names, help=setting.help))


def _parameter(name: str, kind: Any, info: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )
