"""Rank host: process that starts a worker's ranks on a machine other than the worker's own.

    python -m diptych.workers.server.rank_host --listen HOST:PORT

The line that it prints when it listens is JSON: {"address": ..., "pid": ...}. A worker finds it by `rank_hosts`. It
serves one worker at a time (ranks/remote_ranks.py is the worker's side): when the worker's connection ends, it kills
the ranks and waits for the next. No torch.
"""

import argparse
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from ..common.errors import ConfigError, DiptychError, RankLost, WorkerLost
from ..common.exit_codes import exit_code
from ..common.settings import LOOPBACK_HOSTS, read_secret
from ..kv.pool_file import PoolFile
from ..models.plan.rank_settings import RankSettings
from ..parallel.sockets import keep_alive, set_deadline
from ..ranks.link_auth import DEADLINE_S, prove_to_caller
from ..ranks.local_ranks import LocalRanks
from ..ranks.remote_ranks import GO, LOST, READY, SessionStart
from ..telemetry.logs import configure_logs

MOST_WAITING = 16  # connections that have not said who they are
LARGEST_START = 1 << 20  # bytes
BEFORE_S = 20.0  # for the ranks of the last worker to end, and for a worker's second connection

log = logging.getLogger("diptych.ranks")


class RankHost:
    """Listener for workers, on a thread. `ended`: why, once it does not listen any more."""

    def __init__(self, host: str, port: int, token: str | None, cores: tuple[int, ...] | None = None) -> None:
        """cores: of this machine, for the ranks. Raises ConfigError."""
        if token is None and host not in LOOPBACK_HOSTS:
            raise ConfigError(f"a rank host at {host} needs a token (--auth-token-file): without one, use 127.0.0.1")
        self._host, self._port, self._token, self._cores = host, port, token, cores
        self.ended: Future[DiptychError] = Future()
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._is_stopping = False
        self._serving = threading.Lock()  # a worker at a time
        self._kv_links: dict[str, Future[socket.socket]] = {}  # by session
        self._sessions: set[_Session] = set()
        self._lock = threading.Lock()  # guards the two above
        self._slots = threading.BoundedSemaphore(MOST_WAITING)
        self._thread = threading.Thread(target=self._accept, name="diptych-rank-host", daemon=True)

    def start_in_thread(self) -> str:
        """Listen. Returns HOST:PORT. Raises ConfigError."""
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((self._host, self._port))
            self._listener.listen(MOST_WAITING)
        except OSError as e:
            self._listener.close()
            raise ConfigError(f"a rank host cannot listen at {self._host}:{self._port} ({e}): use another") from e
        self._thread.start()
        name = f"[{self._host}]" if ":" in self._host else self._host
        return f"{name}:{self._listener.getsockname()[1]}"

    def begin_stop(self) -> None:
        """Listen no more: `ended` is done soon. Idempotent; also of a signal's handler."""
        self._is_stopping = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End; returns when its ranks have ended. Idempotent."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.stop()
        with self._serving:
            self._listener.close()

    def _accept(self) -> None:
        try:
            while not self._is_stopping:
                self._slots.acquire()
                link, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(link,), name="diptych-rank-link", daemon=True).start()
        except OSError as e:
            if not self._is_stopping:
                self.ended.set_result(RankLost(f"the rank host does not listen any more: {e}"))
        if not self.ended.done():
            self.ended.set_result(WorkerLost("it was stopped"))

    def _greet(self, link: socket.socket) -> None:
        """Serve one connection, on its thread."""
        try:
            try:
                set_deadline(link, DEADLINE_S)
                keep_alive(link)
                prove_to_caller(link, self._token)
                with Connection(link.dup().detach()) as first:
                    start = SessionStart.from_bytes(first.recv_bytes(LARGEST_START))
                set_deadline(link, None)
            finally:
                self._slots.release()
            if start.settings:
                self._serve(link, start)
            else:
                self._kv_link(start.session).set_result(link)
        except (DiptychError, EOFError, OSError) as e:
            log.warning("a connection to this rank host was refused: %s", e or "it was closed")
            link.close()

    def _kv_link(self, session: str) -> "Future[socket.socket]":
        with self._lock:
            return self._kv_links.setdefault(session, Future())

    def _serve(self, link: socket.socket, start: SessionStart) -> None:
        """Serve a worker's control connection until the worker, or one of its ranks, has ended."""
        with Connection(link.detach()) as control:
            try:
                with self._kv_link(start.session).result(BEFORE_S) as kv_link:
                    if not self._serving.acquire(timeout=BEFORE_S):
                        raise RankLost("the rank host serves another worker: start one for each")
                    try:
                        self._run(_Session(control, kv_link, start, self._cores))
                    finally:
                        self._serving.release()
            except TimeoutError:
                log.warning("a worker made no connection for its KV")
            except DiptychError as e:
                log.error("%s", e)
                control.send_bytes(LOST + str(e).encode())
            finally:
                with self._lock:
                    del self._kv_links[start.session]

    def _run(self, session: "_Session") -> None:
        with self._lock:
            self._sessions.add(session)
        try:
            if self._is_stopping:
                raise RankLost("the rank host is stopping")
            session.run()
        finally:
            with self._lock:
                self._sessions.discard(session)
            session.close()


class _Session:
    """Ranks of one worker, on the thread that serves its connection."""

    def __init__(
        self,
        control: "Connection[bytes, bytes]",
        kv_link: socket.socket,
        start: SessionStart,
        cores: tuple[int, ...] | None,
    ) -> None:
        self._control, self._kv_link = control, kv_link
        try:
            settings = RankSettings.from_json(start.settings)
        except (ValueError, TypeError, KeyError) as e:
            raise RankLost(f"the rank host does not know the settings of ranks that it was sent: {e!r}") from e
        memory = PoolFile.make(None, small_pages=True)
        if memory is None:
            raise ConfigError("ranks need the memory files of Linux")
        self._memory = memory
        own = replace(settings, memory_fd=memory.fd, cores=cores)
        self._ranks = LocalRanks(own, own.machine_ranks)
        self._woken, self._waker = socket.socketpair()

    def run(self) -> None:
        """Serve until the worker's connection ends, or `stop`. Returns when all ranks have ended. Raises RankLost where
        one ends first."""
        try:
            self._ranks.start(self._kv_link)
            self._kv_link.close()  # the ranks' end is the end of the connection
            log.info("ranks %d to %d of a worker start here", self._ranks.ranks.start, self._ranks.ranks.stop - 1)
            if why := self._watch():
                raise RankLost(why)
        except OSError as e:
            raise RankLost(f"ranks could not be started, or their worker has gone: {e}") from e
        finally:
            self._ranks.end()

    def close(self) -> None:
        self._woken.close()
        self._waker.close()

    def stop(self) -> None:
        with suppress(OSError):
            self._waker.send(b"s")

    def _watch(self) -> str:
        """Return why a rank has ended; empty where the worker has, or `stop` was called."""
        poll, control, has_said = select.poll(), self._control.fileno(), False
        for descriptor in (control, self._woken.fileno(), *self._ranks.life_lines):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._woken.fileno():
                    return ""
                if descriptor == control:
                    try:
                        said = self._control.recv_bytes()
                    except (EOFError, OSError):
                        return ""
                    if said == GO:
                        self._ranks.go()
                elif not self._ranks.hear(descriptor):
                    return self._ranks.how_ended() or "a rank has said what none says"
            if self._ranks.are_ready and not has_said:
                has_said = True
                self._control.send_bytes(READY)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m diptych.workers.server.rank_host", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:0", help="HOST:PORT; port 0: any free one.  [default: %(default)s]"
    )
    parser.add_argument("--auth-token-file", type=Path, help="the cluster's token; without it DIPTYCH_AUTH_TOKEN")
    args = parser.parse_args()
    try:
        configure_logs("text", "rank host", "%(levelname)s: %(message)s")
        path: Path | None = args.auth_token_file
        given = os.environ.get("DIPTYCH_AUTH_TOKEN", "").strip()
        token = read_secret(path, "--auth-token-file", "token") if path else given or None
        name, _, port = args.listen.rpartition(":")
        if not name or not port.isdigit():
            raise ConfigError(f"--listen must be HOST:PORT, got {args.listen!r}")
        host = RankHost(name.strip("[]"), int(port), token)
        address = host.start_in_thread()
    except DiptychError as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_code(e)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: host.begin_stop())
    print(json.dumps({"address": address, "pid": os.getpid()}), flush=True)
    host.ended.result()
    host.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
