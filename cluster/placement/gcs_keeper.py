"""Keeps the GCS of a Ray of our own: the process in which Ray remembers its nodes, actors and places.

runs ──it dies──> started again at its port, on its storage ──> runs ... ──close──> left to its Node

Its state is in a RocksDB in the session's folder, so a new process goes on where the old one was killed. Meanwhile
raylets, actors and drivers wait for it, for RECONNECT_S at most, and requests need nothing of it. It is private to Ray,
as is lean_ray.py.
"""

import logging
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

RECONNECT_S = 3600  # how long Ray's processes wait for a GCS that is away before they end; 60 by Ray's own default
RETRY_S = 1.0
PROCESS = "gcs_server"  # Ray's name for it

log = logging.getLogger("diptych.ray")


def wait_long() -> None:
    """Have this process, and those that it starts, outlive an absence of the GCS. Call it before Ray is imported."""
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_S))


def store_in(folder: Path) -> None:
    """Have a Ray that this process starts keep its state in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(RAY_gcs_storage="rocksdb", RAY_gcs_storage_path=str(folder))


class GcsKeeper:
    """Watches the GCS of `node`, a ray._private.node.Node, from now on. `close` before the node is ended."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._is_over = threading.Event()
        # A daemon: its process may end without `close`, and Ray's then end with that. They end with the thread that
        # started them, too (PR_SET_PDEATHSIG), so one thread starts all.
        self._thread = threading.Thread(target=self._run, name="gcs-keeper", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it watches no more, which is when the GCS has ended after `close`."""
        self._thread.join()

    def close(self) -> None:
        """Start it no more."""
        self._is_over.set()

    def _run(self) -> None:
        while True:
            code = self._process().wait()
            if self._is_over.is_set():
                return
            log.warning("Ray's GCS ended with %s: it is started again", code)
            try:
                self._start()
            except OSError as e:  # as where memory is short, which may be what ended it
                log.warning("Ray's GCS cannot be started: %s", e)
            if self._is_over.wait(RETRY_S):
                return

    def _process(self) -> "subprocess.Popen[bytes]":
        return self._node.all_processes[PROCESS][0].process

    def _start(self) -> None:
        from ray._private import services

        start: Any = services.start_ray_process  # its types know no DEVNULL
        port = self._node.gcs_address.rpartition(":")[2]
        command = at_port(self._process().args, port)
        started = start(
            command,
            PROCESS,
            fate_share=self._node.kernel_fate_share,
            stdout_file=subprocess.DEVNULL,
            stderr_file=subprocess.DEVNULL,
        )
        self._node.all_processes[PROCESS] = [started]


def at_port(command: Any, port: str) -> list[str]:
    """Return the GCS's command line, with the port that it had found the first time."""
    return [f"--gcs_server_port={port}" if part.startswith("--gcs_server_port=") else part for part in command]
