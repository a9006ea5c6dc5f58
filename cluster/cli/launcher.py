"""`diptych serve`: a Ray, a supervisor in it, ready, watched, ended. Knows no worker and no request.

checked -> Ray ours or joined -> supervisor -> workers and routers ready -> served until a signal -> all ended
"""

import os
import platform
import secrets
import signal
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.text import Text

from ...workers.common.cores import usable_cores
from ...workers.common.errors import CheckpointError, ConfigError, Unavailable
from ...workers.config.extras import check_installed
from ..common import address_file
from ..common.address_file import ClusterAddress
from ..common.config import ClusterConfig
from ..common.deployment import Deployment
from ..common.heartbeat import Silence
from ..common.plurals import count
from ..control.startup import losses, missing, why_it_fails
from ..control.status import ClusterStatus
from ..placement.ray_session import RaySession, join, make_token, start_ours
from ..preflight.checks import (
    check_checkpoint,
    check_dashboard,
    check_drafts,
    check_kv,
    check_machines,
    check_ports,
    check_ranks,
    check_tls,
    check_traces,
    crowding,
    link_tls,
)
from ..tokens.tokenizer_conversion import needs_conversion, tokenizer_folder
from ..tokens.tokenizer_files import find_sources
from . import name_lock
from .banner import banner
from .progress import Progress, StartPhase

if TYPE_CHECKING:
    from ..placement.supervisor_calls import SupervisorClient

POLL_S = 0.1
WATCH_S = 1.0
ANSWER_S = 8.0  # for the supervisor, which answers in milliseconds
SILENT_LOOKS = 2  # in a row: then it is started again
STARTING_LOOKS = 15  # before its first answer: a machine may be busy with all that starts


class StopSignals:
    """SIGINT and SIGTERM. The first is raised as KeyboardInterrupt, wherever the main thread is: of other exceptions
    asyncio logs some and goes on. Those that follow are ignored: they must not interrupt the end that it began."""

    def __init__(self) -> None:
        self.have_come = False

    def install(self) -> None:
        """Take them, once more after Ray has started, which sets a handler of its own. Raises KeyboardInterrupt."""
        self.check()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def check(self) -> None:
        """Raise KeyboardInterrupt if one has come: a library may have caught what was raised within it."""
        if self.have_come:
            raise KeyboardInterrupt

    def ignore(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def is_cause_of(self, error: BaseException) -> bool:
        """Return whether a signal is what ended the work, whatever a library made of it. Ray's own handler raises
        SystemExit, which a call of Ray turns into an error of another kind, of which it is the cause."""
        found: BaseException | None = error
        while found and not isinstance(found, SystemExit):
            found = found.__cause__
        return self.have_come or found is not None

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.ignore()
        self.have_come = True
        raise KeyboardInterrupt


def serve(config: ClusterConfig, console: Console) -> None:
    """Returns after a signal, with every process ended. Raises DiptychErrors, and KeyboardInterrupt for a signal that
    came before it was ready; then, too, nothing is left behind."""
    with name_lock.hold(config.name):
        _serve(config, console)


def _serve(config: ClusterConfig, console: Console) -> None:
    signals, progress = StopSignals(), Progress(console)
    signals.install()
    launcher = _Launcher(config, console, progress, signals)
    try:
        _prepare(config, console, progress)
        # Ray prints pages about a lost worker; `news` prints one line.
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            launcher.run()
    except BaseException as e:
        if not signals.is_cause_of(e):
            raise
        launcher.keep_logs = False
        console.print("stopping")
        if not launcher.is_ready:
            raise KeyboardInterrupt from e
    finally:
        signals.ignore()
        launcher.close()


def _prepare(config: ClusterConfig, console: Console, progress: Progress) -> None:
    with progress.phase("checked the settings"):
        check(config)
    if not os.environ.get("RAY_ADDRESS"):
        if warning := crowding(config, len(usable_cores())):
            console.print(Text(warning, style="yellow"), soft_wrap=True)
        _convert_tokenizer(Path(config.shared.model.model), progress)


def check(config: ClusterConfig) -> None:
    """Check all that can be wrong before a process is started. Raises DiptychErrors."""
    check_installed("`diptych serve`")
    if not os.environ.get("RAY_ADDRESS"):
        # On a Ray of many machines the model and the ports are another machine's matter.
        check_machines(config)
        check_checkpoint(Path(config.shared.model.model))
        check_ranks(config)
        check_drafts(config)
        check_kv(config)
        check_tls(config)
        check_traces(config)
        check_dashboard(config)
        check_ports(config)


def _convert_tokenizer(folder: Path, progress: Progress) -> None:
    """Convert the tokenizer before Ray starts, so that a failure is reported early; routers find the result in the
    cache."""
    if needs_conversion(folder):
        names = " and ".join(path.name for path in find_sources(folder))
        phase = progress.phase("converting the tokenizer", f"transformers reads {names}")
        with phase as shown, tokenizer_folder(folder) as kept:
            shown.done = f"converted {names} to a tokenizer.json, kept in {kept}"


class _Launcher:
    def __init__(self, config: ClusterConfig, console: Console, progress: Progress, signals: StopSignals) -> None:
        self._config = config
        self._console = console
        self._progress = progress
        self._signals = signals
        self._session: RaySession | None = None
        self._supervisor: SupervisorClient | None = None
        self._silence = Silence(STARTING_LOOKS)
        self._has_answered = False  # the supervisor, which starts until then
        self._is_registered = False
        self.keep_logs = False
        self.is_ready = False

    def run(self) -> None:
        self._start_ray()
        with self._progress.phase("starting workers", "the supervisor starts") as phase:
            self._start_supervisor()
            status = self._wait_until_ready(phase)
        self.is_ready = True
        self._console.print()
        text = banner(self._config, status, self._progress.elapsed_s)
        self._console.print(Text(text), soft_wrap=True)
        self._watch(status)

    def close(self) -> None:
        # One that has not started yet would be waited for; a Ray of our own ends with all that is in it.
        is_alone = self._session and self._session.is_ours and not self._has_answered
        if self._supervisor and not is_alone:
            self._supervisor.shutdown()
        if self._session:
            if self.keep_logs and self._session.is_ours:
                folder = address_file.home() / f"{self._config.name}.logs"
                self._session.save_logs(folder)
                self._console.print(Text(f"the logs are in {folder}"), soft_wrap=True)
            self._session.close()
        if self._is_registered:
            address_file.remove(self._config.name)

    def _start_ray(self) -> None:
        config, address = self._config, os.environ.get("RAY_ADDRESS")
        path = None
        title, waits_for = ("joining Ray", f"{address} to answer") if address else ("starting Ray", "its processes")
        with self._progress.phase(title, waits_for) as phase:
            if address:
                path = os.environ.get("RAY_AUTH_TOKEN_PATH")
                self._session = join(address, Path(path) if path else None)
                phase.done = f"joined Ray at {self._session.address}"
            else:
                self._is_registered = True
                path = str(make_token(address_file.token_path(config.name)))
                self._session = start_ours(Path(path), dashboard=config.dashboard)
                phase.done = "Ray runs, on loopback, with a token"
        self._signals.install()
        if not self._session.enforces_token:
            self._console.print("warning: this Ray obeys anyone who reaches it; start it with RAY_AUTH_MODE=token")
        self._is_registered = True
        address_file.write(_address(config.name, self._session, path))
        self.keep_logs = True

    def _start_supervisor(self) -> None:
        assert self._session
        # Imports Ray, which reads its environment once: only after the session has set it.
        from ..placement.supervisor_calls import SupervisorClient, check_placeable

        deployment = Deployment(
            self._config, secrets.token_hex(32), is_local=self._session.is_ours, tls=link_tls(self._config)
        )
        if self._session.is_ours:
            check_placeable(self._config)
        self._supervisor = SupervisorClient.start(deployment)

    def _wait_until_ready(self, phase: StartPhase) -> ClusterStatus:
        before = None
        while True:
            if (status := self._look()) is None:
                phase.note(f"the supervisor {'does not answer' if self._has_answered else 'starts'}")
                time.sleep(WATCH_S)  # a call of Ray may fail immediately, so checks are counted
                continue
            for line in losses(before, status):
                self._console.print(Text(line), soft_wrap=True)
            before = status
            if error := why_it_fails(status):
                self.keep_logs = not isinstance(error, ConfigError | CheckpointError)  # they report no more of these
                raise error
            if status.state == "ready":
                workers, routers = count(len(status.workers), "worker"), count(len(status.routers), "router")
                phase.done = f"{workers} and {routers} are ready"
                return status
            phase.note(missing(status))
            time.sleep(POLL_S)

    def _watch(self, status: ClusterStatus) -> None:
        """Say what changes until a signal ends it. Raises Unavailable where somebody else has ended the cluster."""
        while True:
            time.sleep(WATCH_S)
            if (now := self._look()) is None:
                continue
            for line in news(status, now):
                self._console.print(Text(line), soft_wrap=True)
            status = now

    def _look(self) -> ClusterStatus | None:
        """None where the supervisor is silent, which ends nothing: workers and routers go on without it. One that stays
        silent is started again. Raises Unavailable where Ray says that it was ended for good."""
        assert self._supervisor
        self._signals.check()
        from ..placement.supervisor_calls import SupervisorGone

        try:
            status = self._supervisor.status(ANSWER_S)
        except SupervisorGone as e:
            raise Unavailable("another process ended the cluster or its Ray. Start it again") from e
        except Unavailable as e:
            if self._silence.look(has_answered=False):
                goes_on = "; requests go on" if self.is_ready else ""
                self._console.print(Text(f"{e.message}: it is started again{goes_on}"), soft_wrap=True)
                self._supervisor.restart()
                self._silence = Silence(STARTING_LOOKS)
            return None
        self._has_answered = True
        self._silence = Silence(SILENT_LOOKS)
        return status


def news(before: ClusterStatus, now: ClusterStatus) -> list[str]:
    """Return lines that tell a person at the terminal what has changed."""
    lines = losses(before, now)
    old = {p.name: p for p in before.pools}
    for pool in now.pools:
        was = old[pool.name]
        if (pool.target, pool.num_ready) != (was.target, was.num_ready):
            lines.append(f"{pool.name}: {pool.num_ready} of {pool.target} ready")
    routers = {r.router_id: r for r in before.routers}
    for router in now.routers:
        was_router = routers.get(router.router_id)
        if was_router and was_router.phase != router.phase:
            lines.append(f"{router.router_id}: {router.phase}")
    return lines


def _address(name: str, session: RaySession, token_path: str | None) -> ClusterAddress:
    started = address_file.start_of(psutil.Process())
    return ClusterAddress(name, session.address, token_path, session.is_ours, os.getpid(), started, platform.node())
