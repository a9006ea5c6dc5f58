"""Worker process: loads the model, serves it, says where.

    python -m diptych.workers.server.worker --model DIR

The line that it prints when it is ready is JSON: {"address": ..., "incarnation": ..., "pid": ...}.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.cores import affinity_kept, bind_this_thread, cores_to_serve, openmp_settings, part_of, usable_cores
from ..common.errors import ConfigError, DiptychError, InternalError, RankLost, WorkerLost
from ..common.event_loop import new_event_loop
from ..common.exit_codes import exit_code
from ..common.garbage import leave, loading
from ..common.settings import read_secret
from ..common.tls import TlsFiles
from ..config.extras import check_installed
from ..config.worker_config import SETTINGS, Setting, WorkerConfig
from ..core.runner import Runner
from ..telemetry.logs import configure_logs
from .load_progress import load_progress

if TYPE_CHECKING:  # a client's installation lacks what it imports
    from .service import WorkerAddress

NEEDED = ("torch", "grpcio-health-checking", "grpcio-reflection", "safetensors")  # of config/extras.py
TOKEN_VARIABLE = "DIPTYCH_AUTH_TOKEN"
TLS_FILES = {
    "ca": "the authority of all certificates",
    "cert": "this process's certificate",
    "key": "the certificate's key",
}

log = logging.getLogger("diptych.worker")


@affinity_kept()
def load_runner(config: WorkerConfig, on_loss: Callable[[RankLost], object]) -> Runner:
    """`on_loss`: called on another thread if a rank is lost later. Raises CheckpointError, ConfigError or RankLost."""
    # Read when torch is first imported. Threads that spin while they wait take the cores from the other workers of the
    # machine: a step took up to a hundred times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.update(openmp_settings(part_of(config.cores, 0, config.parallel.ranks_per_machine)))
    from ..execution.model_runner import ModelRunner

    with load_progress(config.model.model) as progress:
        return ModelRunner.load(config, progress, on_loss)


async def run_worker(config: WorkerConfig, ready: "Future[WorkerAddress]", stop: asyncio.Event) -> None:
    """Load, serve, and resolve `ready`; return once `stop` is set and everything is closed.

    Raises RankLost, once everything is closed, if a rank ended: the worker is to be started again.
    """
    lost: Future[RankLost] = Future()
    try:
        with loading():
            from .service import WorkerService  # imports torch

            runner = await asyncio.to_thread(load_runner, config, lost.set_result)
        if not config.model.look_ahead:  # else the engine's thread is one of them, and should be near what computes
            # Before the others are started, for they inherit it.
            bind_this_thread(cores_to_serve(config.cores, usable_cores(), config.role))
        try:
            service = WorkerService(config, runner)
            where = await service.start()
        except BaseException:
            runner.close()
            raise
        ready.set_result(where)
    except BaseException as e:
        ready.set_exception(e)
        raise
    lost.add_done_callback(lambda loss: service.end_with(loss.result()))
    try:
        await service.run(stop)
    finally:
        await service.stop()


class WorkerProcess:
    """A worker on a thread of a process that has other things to do (a Ray actor)."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self.ended: Future[DiptychError] = Future()  # why, once nothing serves any more
        self.ended.set_running_or_notify_cancel()  # threads that wait for it may continue
        self._ready: Future[WorkerAddress] = Future()
        self._loop = new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="diptych-worker", daemon=True)

    def start_in_thread(self) -> "WorkerAddress":
        """Start the worker and wait for its address. Raises what loading or listening raised."""
        self._thread.start()
        return self._ready.result()

    def stop(self) -> None:
        """Stop the worker. Idempotent; returns when the server is closed and the engine has ended."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        reason: DiptychError = WorkerLost("it was stopped")
        try:
            self._loop.run_until_complete(run_worker(self._config, self._ready, self._stop))
        except DiptychError as e:
            reason = e  # while loading, `start_in_thread` raises it
        except Exception as e:
            # The thread's top loop: threads that wait for its end must learn that it failed.
            log.exception("the worker failed by our own fault")
            reason = InternalError(f"the worker failed ({type(e).__name__}: {e}); its log has the traceback")
        finally:
            self._loop.close()
            self.ended.set_result(reason)


def parse_args(argv: list[str]) -> WorkerConfig:
    """Settings from flags: one for each setting of a worker. But the token is read from a file or the environment, for
    `ps` would show it to every user. Raises ConfigError."""
    # A prefix of a flag is none: `--auth-token SECRET` must not pass for the file's name.
    parser = argparse.ArgumentParser(
        prog="python -m diptych.workers.server.worker", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--auth-token-file", type=Path, help=f"what callers must show; without it {TOKEN_VARIABLE}")
    for setting in SETTINGS.values():
        if setting.name not in ("auth_token", "tls"):
            _add_flag(parser, setting)
    for name, what in TLS_FILES.items():
        parser.add_argument(f"--tls-{name}", help=f"PEM file of {what}; with the other two: TLS between processes")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    path: Path | None = given.pop("auth_token_file", None)
    token = (
        read_secret(path, "--auth-token-file", "token") if path else os.environ.get(TOKEN_VARIABLE, "").strip() or None
    )
    tls = _take_tls(given)
    return WorkerConfig.of(**given, auth_token=token, tls=tls)


def _take_tls(given: dict[str, Any]) -> TlsFiles | None:
    """Take the flags of TLS out of `given`. Raises ConfigError."""
    files = {name: path for name in TLS_FILES if (path := given.pop(f"tls_{name}", None))}
    if missing := TLS_FILES.keys() - files.keys() if files else ():
        flags = ", ".join(f"--tls-{name}" for name in sorted(missing))
        raise ConfigError(f"TLS needs three files: add {flags}, or leave the others out")
    return TlsFiles(**files) if files else None


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    def items(text: str) -> object:
        return text if text == "auto" else tuple(setting.flag_type(item) for item in text.split(","))

    description = setting.help.replace("%", "%%")
    if setting.flag_type is bool:
        parser.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=description)
    else:
        kind = items if setting.is_list else setting.flag_type
        parser.add_argument(setting.flag, type=kind, required=setting.is_required, help=description)


async def _main(config: WorkerConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ready: Future[WorkerAddress] = Future()
    ready.add_done_callback(lambda f: f.exception() or print(json.dumps(asdict(f.result())), flush=True))
    await run_worker(config, ready, stop)


def main() -> int:
    try:
        config = parse_args(sys.argv[1:])
        check_installed("a worker", NEEDED)
        configure_logs(config.telemetry.log_format, "worker", "%(levelname)s: %(message)s")
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_main(config))
    except DiptychError as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_code(e)
    return 0


if __name__ == "__main__":
    leave(main())
