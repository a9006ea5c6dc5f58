"""The `diptych` command. Flags say what cluster.yaml says; Ray is imported only by the commands that need it."""

import errno
import functools
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import psutil
import typer
from rich.console import Console
from rich.text import Text

from ... import __version__
from ...workers.common.errors import ConfigError, DiptychError, Unavailable
from ...workers.common.exit_codes import FOUND, INTERRUPTED, exit_code
from ...workers.common.settings import read_secret
from ..batch.command import batch
from ..bench.command import bench
from ..common import address_file, config_file
from ..common.config import POOL_NAMES, ClusterConfig
from ..picker.command import endpoint_picker
from ..preflight.checks import resolve_paths
from .experts import experts
from .plan import plan
from .quantize import quantize
from .router import drain, router
from .serve_flags import given_to_workers, parameters, tls_of
from .simulate import profile, simulate
from .upgrade import upgrade

if TYPE_CHECKING:
    from ..control.status import ClusterStatus

STOP_S = 30.0
POLL_S = 0.2
FULL = {errno.ENOSPC, errno.EDQUOT}  # a disk

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
            with _files_named():
                command(*args, **kwargs)
        except DiptychError as e:
            Console(stderr=True).print(Text(f"error: {e.message}", style="red"), soft_wrap=True)
            raise typer.Exit(exit_code(e)) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    return run


@contextmanager
def _files_named() -> Generator[None]:
    """Raise ConfigError where the body meets a file that it may not use, or a full disk."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:
            raise ConfigError(f"{e.filename or 'a file'} cannot be written: {e.strerror}. Free some space") from e
        if e.filename is None and not isinstance(e, FileNotFoundError):  # which tempfile raises without a name
            raise
        raise ConfigError(
            f"cannot use {e.filename or 'a file'}: {e.strerror}. Check the path and who may use it"
        ) from e


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"diptych {__version__}")
        raise typer.Exit


@app.callback()
@_reports_errors
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    if home := os.environ.get("DIPTYCH_HOME"):
        # Processes of a cluster inherit it, and run in other folders.
        try:
            os.environ["DIPTYCH_HOME"] = str(Path(home).expanduser().absolute())
        except RuntimeError as e:  # ~ of a user that there is not
            raise ConfigError(f"DIPTYCH_HOME: {home} is in no user's home folder: write the whole path") from e


Name = Annotated[str, typer.Option(help="The cluster's name.")]


@_reports_errors
def serve(**given: Any) -> None:
    """Serve MODEL until Ctrl-C. Starts Ray on this machine, or joins the one named by RAY_ADDRESS."""
    key_file: Path | None = given["api_key_file"]
    flags = {
        "model": given["model"],
        "name": given["name"],
        "dashboard": given["dashboard"],
        "tls": tls_of(given),
        **given_to_workers(given, every_pool=False),
        "router": {
            "host": given["host"],
            "http_port": given["http_port"],
            "grpc_port": given["grpc_port"],
            "api_key": read_secret(key_file, "--api-key-file", "key") if key_file else _stripped(given["api_key"]),
            "api_keys_file": given["api_keys_file"],
            # No flag: `ps` would show it.
            "metrics_key": _stripped(os.environ.get(config_file.KEY_VARIABLES["metrics_key"])),
            "strict": given["strict"],
            "tool_parser": given["tool_parser"],
            "reasoning_parser": given["reasoning_parser"],
        },
    }
    replicas = {pool: given[pool] for pool in POOL_NAMES}
    shared = {"cores": given["cores"], **given_to_workers(given, every_pool=True)}
    _run(config_file.load(given["config"], flags, replicas, shared))


def _stripped(key: str | None) -> str | None:
    """Key without the line's end that a file or a secret of Kubernetes has given it: no client can send one."""
    return None if key is None else key.strip()


serve.__signature__ = inspect.Signature(parameters())  # typer makes a flag of each
app.command()(serve)


@app.command()
@_reports_errors
def status(
    name: Name = "default",
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Have every worker compare its books.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Show the controller's last decisions and their reasons.")] = False,
) -> None:
    """Show the pools, workers and routers of a running cluster."""
    from ..placement.remote import connected
    from .status_view import render, render_decisions

    with connected(name) as supervisor:
        found = supervisor.status()
        problems = {worker: what for worker, what in supervisor.audit().items() if what} if check else {}
    if as_json:
        print(json.dumps(found.to_json() | {"problems": problems}, indent=2))
    else:
        _console().print(render_decisions(found) if why else render(found))
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
            if _retargeted(now, replicas):
                break
            time.sleep(POLL_S)
    for pool in now.pools:
        if pool.target or pool.num_draining or pool.name in replicas:
            leaving = f", {pool.num_draining} leaving" if pool.num_draining else ""
            console.print(f"{pool.name}: {pool.num_ready} of {pool.target} ready{leaving}", soft_wrap=True)
    if changed := _retargeted(now, replicas):
        raise Unavailable(
            f"the target of {' and '.join(changed)} has been changed since, by another command or the autoscaler: see "
            "`diptych status`"
        )
    if timeout and not now.is_settled:
        raise Unavailable(
            f"the pools do not have the new size after {timeout:g} s; scaling continues: check it with `diptych status`"
        )


@app.command()
@_reports_errors
def stop(name: Name = "default") -> None:
    """Stop a running cluster, from any terminal."""
    address = address_file.read(name)
    if address and (serving := address_file.serving_process(address)):
        try:
            with suppress(psutil.NoSuchProcess):
                serving.send_signal(signal.SIGTERM)
        except psutil.AccessDenied as e:
            raise ConfigError(f"process {serving.pid} is another user's, who alone can stop it") from e
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
def doctor(
    config: Annotated[
        Path | None, typer.Option(help="YAML file of a cluster: its certificates are checked too.")
    ] = None,
) -> None:
    """Check this machine, with a remedy for what is missing."""
    from ..preflight.doctor import Verdict, examine

    console = _console()
    styles = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red"}
    failed = False
    for finding in examine(config_file.load(config, {}) if config else None):
        failed = failed or finding.verdict is Verdict.FAILED
        remedy = f"\n         {finding.remedy}" if finding.remedy else ""
        verdict = (f"{finding.verdict.value:<8} ", styles[finding.verdict])
        console.print(Text.assemble(verdict, (finding.name, "bold"), f": {finding.detail}{remedy}"), soft_wrap=True)
    if failed:
        raise typer.Exit(FOUND)


app.command()(_reports_errors(bench))
app.command()(_reports_errors(batch))
app.command()(_reports_errors(plan))
app.command()(_reports_errors(quantize))
app.command()(_reports_errors(simulate))
app.command()(_reports_errors(profile))
app.command()(_reports_errors(experts))
app.command()(_reports_errors(router))
app.command()(_reports_errors(drain))
app.command("endpoint-picker")(_reports_errors(endpoint_picker))
app.command()(_reports_errors(upgrade))


def _run(settings: ClusterConfig) -> None:
    """Serve until the end."""
    from .launcher import serve

    serve(resolve_paths(settings), _console())


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


def _retargeted(status: "ClusterStatus", replicas: dict[str, int]) -> list[str]:
    """Return the pools whose target is not the wanted one any more."""
    return [pool.name for pool in status.pools if pool.target != replicas.get(pool.name, pool.target)]


def _console() -> Console:
    # A pipe has no width: text that is cut at 80 columns would be lost.
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
