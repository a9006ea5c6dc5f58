"""The `diptych` command. Flags say what cluster.yaml says; Ray is imported only by the commands that need it."""

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from ... import __version__
from ...workers.common.errors import ConfigError, DiptychError, Unavailable
from ...workers.common.exit_codes import FOUND, INTERRUPTED, exit_code
from ..bench.command import bench
from ..common import address_file, config_file
from ..common.config import POOL_NAMES, ClusterConfig
from ..preflight.checks import resolve_model
from .experts import experts
from .plan import plan

STOP_S = 30.0
POLL_S = 0.2

P = ParamSpec("P")

app = typer.Typer(
    name="diptych",
    help="Serve large language models on a prefill pool and a decode pool.",
    epilog="Exit codes: 0 done; 1 a fault of Diptych's; 2 what was given is wrong; 3 who should answer does not; 4 a "
    "check found trouble; 130 interrupted. See docs/cli.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Errors that have a name end the command with one line and an exit code (exit_codes.py)."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except DiptychError as e:
            Console(stderr=True).print(Text(f"error: {e.message}", style="red"), soft_wrap=True)
            raise typer.Exit(exit_code(e)) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    return run


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"diptych {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


Name = Annotated[str, typer.Option(help="The cluster's name.")]
ServeKey = Annotated[
    str | None,
    typer.Option(
        envvar=config_file.KEY_VARIABLES["api_key"],
        help="Asked of every client. Other users of this machine can read a flag: use the variable, or a file.",
    ),
]


@app.command()
@_reports_errors
def serve(  # noqa: PLR0913, PLR0917  typer makes a flag of each parameter
    model: Annotated[str | None, typer.Argument(help="Folder of a Hugging Face checkpoint, or `tiny`.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.  [default: 1]")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.  [default: 1]")] = None,
    mixed: Annotated[int | None, typer.Option(help="Workers that do both.  [default: 0]")] = None,
    config: Annotated[Path | None, typer.Option(help="cluster.yaml; flags win over it.")] = None,
    name: Annotated[str | None, typer.Option(help="The cluster's name.  [default: default]")] = None,
    host: Annotated[str | None, typer.Option(help="Where the front door listens.  [default: 127.0.0.1]")] = None,
    http_port: Annotated[int | None, typer.Option(help="0: any free port.  [default: 8000]")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="0: any free port.  [default: 50051]")] = None,
    api_key: ServeKey = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File of the API key; wins over --api-key.")] = None,
    strict: Annotated[bool | None, typer.Option(help="Refuse requests with unknown fields.  [default: ignore]")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32.  [default: bfloat16]")] = None,
    quantize: Annotated[str | None, typer.Option(help="Weights at load: int8 or int4.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.  [default: cpu]")] = None,
    max_context_tokens: Annotated[int | None, typer.Option(help="Longest sequence.  [default: the model's]")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Longest prefill chunk; 0: no limit.  [default: 0]")] = None,
    layer_groups: Annotated[
        int | None, typer.Option(help="In how many groups of layers KV is handed off; 0: by cost.  [default: 0]")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV cache of each worker, as 2GiB.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads of each worker.")] = None,
    cores: Annotated[int | None, typer.Option(help="Cores that each worker is bound to; 0: none.")] = None,
    transport: Annotated[list[str] | None, typer.Option(help="How KV travels, best first; may repeat.")] = None,
    verify_kv: Annotated[bool | None, typer.Option(help="Check by checksums what hand-offs bring.")] = None,
    dashboard: Annotated[bool | None, typer.Option(help="Start Ray's dashboard, on loopback.")] = None,
) -> None:
    """Serve MODEL until Ctrl-C. Starts Ray on this machine, or joins the one named by RAY_ADDRESS."""
    flags: dict[str, Any] = {
        "model": model,
        "name": name,
        "served_model_name": served_model_name,
        "dtype": dtype,
        "quantize": quantize,
        "device": device,
        "max_context_tokens": max_context_tokens,
        "transports": transport or None,
        "verify_kv": verify_kv,
        "dashboard": dashboard,
        "router": {
            "host": host,
            "http_port": http_port,
            "grpc_port": grpc_port,
            "api_key": config_file.read_key(api_key_file) if api_key_file else api_key,
            "metrics_key": os.environ.get(config_file.KEY_VARIABLES["metrics_key"]),  # no flag: `ps` would show it
            "strict": strict,
        },
    }
    shared = {
        "chunk_tokens": chunk_tokens,
        "layer_groups": layer_groups,
        "kv_memory_bytes": kv_memory,
        "threads": threads,
        "cores": cores,
    }
    _run(config_file.load(config, flags, {"prefill": prefill, "decode": decode, "mixed": mixed}, shared))


@app.command()
@_reports_errors
def status(
    name: Name = "default",
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Have every worker compare its books.")] = False,
) -> None:
    """Show the pools, workers and routers of a running cluster."""
    from ..placement.remote import connected
    from .status_view import render

    with connected(name) as supervisor:
        found = supervisor.status()
        problems = {worker: what for worker, what in supervisor.audit().items() if what} if check else {}
    if as_json:
        print(json.dumps(found.to_json() | {"problems": problems}, indent=2))
    else:
        _console().print(render(found))
    if problems:
        _console().print(Text("\n".join(f"{worker}: {what}" for worker, what in problems.items()), style="red"))
        raise typer.Exit(FOUND)


@app.command()
@_reports_errors
def scale(
    targets: Annotated[list[str], typer.Argument(help="POOL=N ...", metavar="POOL=N...")],
    name: Name = "default",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for it; 0: do not wait.")] = 600.0,
) -> None:
    """Resize pools, as in `diptych scale prefill=3 decode=2`, and wait until it is done."""
    replicas = _parse_targets(targets)
    from ..placement.remote import connected

    console = _console()
    with connected(name) as supervisor:
        supervisor.scale(replicas)
        deadline = time.monotonic() + timeout
        while not (now := supervisor.status()).is_settled and time.monotonic() < deadline:
            time.sleep(POLL_S)
    for pool in now.pools:
        if pool.target or pool.num_draining or pool.name in replicas:
            leaving = f", {pool.num_draining} leaving" if pool.num_draining else ""
            console.print(f"{pool.name}: {pool.num_ready} of {pool.target} ready{leaving}", soft_wrap=True)
    if timeout and not now.is_settled:
        raise Unavailable(f"the pools are not there after {timeout:g} s; it goes on: watch it with `diptych status`")


@app.command()
@_reports_errors
def stop(name: Name = "default") -> None:
    """Stop a running cluster, from any terminal."""
    address = address_file.read(name)
    if address and (serving := address_file.serving_process(address)):
        serving.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while address_file.serving_process(address):
            if time.monotonic() > deadline:
                raise Unavailable(f"process {serving.pid} does not end: kill it with `kill -9 {serving.pid}`")
            time.sleep(POLL_S)
    else:
        from ..placement.remote import connected

        with connected(name) as supervisor:
            supervisor.shutdown()
        address_file.remove(name)
    _console().print(f"{name} is stopped")


@app.command()
@_reports_errors
def doctor() -> None:
    """Check this machine, with a remedy for what is missing."""
    from ..preflight.doctor import Verdict, examine

    console = _console()
    styles = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red"}
    failed = False
    for finding in examine():
        failed = failed or finding.verdict is Verdict.FAILED
        remedy = f"\n         {finding.remedy}" if finding.remedy else ""
        verdict = (f"{finding.verdict.value:<8} ", styles[finding.verdict])
        console.print(Text.assemble(verdict, (finding.name, "bold"), f": {finding.detail}{remedy}"), soft_wrap=True)
    if failed:
        raise typer.Exit(FOUND)


app.command()(_reports_errors(bench))
app.command()(_reports_errors(plan))
app.command()(_reports_errors(experts))


def _run(settings: ClusterConfig) -> None:
    """Serve until the end."""
    from .launcher import Stopped, serve

    try:
        serve(settings.model_copy(update={"model": resolve_model(settings.model)}), _console())
    except Stopped:
        raise typer.Exit(INTERRUPTED) from None


def _parse_targets(texts: list[str]) -> dict[str, int]:
    """['prefill=3'] -> {'prefill': 3}. Raises ConfigError."""
    replicas: dict[str, int] = {}
    for text in texts:
        pool, _, number = text.partition("=")
        if pool not in POOL_NAMES and (close := get_close_matches(pool, POOL_NAMES, n=1)):
            raise ConfigError(f"there is no pool {pool!r}. Did you mean {close[0]!r}?")
        if pool not in POOL_NAMES or not number.isdecimal():
            pools = f"POOL=N, where POOL is one of {', '.join(POOL_NAMES)}"
            raise ConfigError(f"{text!r} is not {pools}. Write for example `diptych scale prefill=3 decode=2`")
        if pool in replicas:
            raise ConfigError(f"{pool} is given twice")
        replicas[pool] = int(number)
    return replicas


def _console() -> Console:
    # A pipe has no width: what is cut at 80 columns there is lost.
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
