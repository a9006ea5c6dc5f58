"""One worker process: load the model, serve it, say where.

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
from dataclasses import asdict, fields
from pathlib import Path

from ..common.cores import affinity_kept, bind_this_thread, cores_to_serve, openmp_settings, part_of, usable_cores
from ..common.errors import ConfigError, DiptychError, InternalError, RankLost, WorkerLost
from ..common.event_loop import new_event_loop
from ..common.exit_codes import exit_code
from ..common.garbage import loading
from ..config.worker_config import WorkerConfig
from ..core.runner import Runner
from .load_progress import load_progress
from .service import WorkerAddress, WorkerService

TOKEN_VARIABLE = "DIPTYCH_AUTH_TOKEN"

log = logging.getLogger("diptych.worker")


@affinity_kept()
def load_runner(config: WorkerConfig, on_loss: Callable[[RankLost], object]) -> Runner:
    """`on_loss`: called on another thread if a rank is lost later. Raises CheckpointError, ConfigError or RankLost."""
    # Read when torch is first imported. Threads that spin while they wait take the cores from the other workers of the
    # machine: a step took up to a hundred times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.update(openmp_settings(part_of(config.cores, 0, config.tensor_parallel)))
    from ..execution.model_runner import ModelRunner
    from ..execution.model_runner_config import ModelRunnerConfig

    settings = ModelRunnerConfig(
        model_path=Path(config.model),
        served_model_name=config.served_model_name,
        dtype=config.dtype,
        device=config.device,
        num_threads=config.threads,
        cores=config.cores,
        quantize=config.quantize,
        cpu_isa=config.cpu_isa,
        look_ahead=config.look_ahead,
        cuda_graphs=config.cuda_graphs,
        max_running=config.max_running,
        tensor_parallel=config.tensor_parallel,
        expert_parallel=config.expert_parallel,
        expert_placement=config.expert_placement,
        expert_copies=config.expert_copies,
        peer_group=config.peer_group,
        block_size=config.block_size,
        kv_axis_order=config.kv_axis_order,
        kv_memory_bytes=config.kv_memory_bytes,
        kv_memory_fraction=config.kv_memory_fraction,
        max_context_tokens=config.max_context_tokens,
    )
    with load_progress(config.model) as progress:
        return ModelRunner.load(settings, progress, on_loss)


async def run_worker(config: WorkerConfig, ready: "Future[WorkerAddress]", stop: asyncio.Event) -> None:
    """Load, serve, and resolve `ready`; return once `stop` is set and everything is closed.

    Raises RankLost, once everything is closed, if a rank ended: the worker is to be started again.
    """
    lost: Future[RankLost] = Future()
    try:
        config.validate()
        with loading():
            runner = await asyncio.to_thread(load_runner, config, lost.set_result)
        if not config.look_ahead:  # else the engine's thread is one of them, and should be near what computes
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
        self.ended.set_running_or_notify_cancel()  # whoever waits for it may go
        self._ready: Future[WorkerAddress] = Future()
        self._loop = new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="diptych-worker", daemon=True)

    def start_in_thread(self) -> WorkerAddress:
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
            # The thread's top loop: whoever waits for the end must learn that it was no stop.
            log.exception("the worker failed by our own fault")
            reason = InternalError(f"the worker failed ({type(e).__name__}: {e}); its log has the traceback")
        finally:
            self._loop.close()
            self.ended.set_result(reason)


def parse_args(argv: list[str]) -> WorkerConfig:
    """Flags are WorkerConfig's fields, with dashes; but the token, which `ps` would show to every user, is read from a
    file or the environment. Raises ConfigError."""
    # A prefix of a flag is none: `--auth-token SECRET` must not pass for the file's name.
    parser = argparse.ArgumentParser(
        prog="python -m diptych.workers.server.worker", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--auth-token-file", type=Path, help=f"what callers must show; without it {TOKEN_VARIABLE}")
    defaults = {f.name: f.default for f in fields(WorkerConfig)}
    types = {"threads": int, "kv_memory_bytes": int, "max_context_tokens": int, "target_step_s": float}
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        if name == "auth_token":
            continue
        if name == "model":
            parser.add_argument(flag, required=True)
        elif isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        elif name == "cores":
            parser.add_argument(flag, default=default, type=lambda v: tuple(int(core) for core in v.split(",")))
        elif name == "transports":
            parser.add_argument(flag, default=default, type=lambda v: v if v == "auto" else tuple(v.split(",")))
        else:
            parser.add_argument(flag, default=default, type=types.get(name, str if default is None else type(default)))
    given = vars(parser.parse_args(argv))
    token = _auth_token(given.pop("auth_token_file"))
    return WorkerConfig(**given, auth_token=token)


def _auth_token(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--auth-token-file: cannot read {path} ({e}): check the path") from e
    if not token:
        raise ConfigError(f"--auth-token-file: {path} is empty: write the token into it")
    return token


async def _main(config: WorkerConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ready: Future[WorkerAddress] = Future()
    ready.add_done_callback(lambda f: f.exception() or print(json.dumps(asdict(f.result())), flush=True))
    await run_worker(config, ready, stop)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_main(parse_args(sys.argv[1:])))
    except DiptychError as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_code(e)
    return 0


if __name__ == "__main__":
    sys.exit(main())
