"""A running cluster's supervisor, for a command in another terminal."""

import os
import platform
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from ...workers.common.errors import Unavailable
from ...workers.config.extras import check_installed
from ..common import address_file
from .ray_session import RaySession, join

if TYPE_CHECKING:
    from .supervisor_calls import SupervisorClient

RETRY_S = 1.0


@contextmanager
def connected(name: str, wait_s: float = 0.0) -> "Generator[SupervisorClient]":
    """The cluster that was started from here under `name`, or on the Ray that RAY_ADDRESS names; where that runs none
    yet, it may come within `wait_s`. Raises Unavailable, and ConfigError without Ray.

    Meanwhile sys.stdout is standard error: Ray's driver prints what its cluster reports (a node that is missing, say)
    among the command's output, whatever it was told about logs."""
    with redirect_stdout(sys.stderr):
        session = _session(name)
        try:
            yield _find(name, wait_s)
        finally:
            session.close()


def _find(name: str, wait_s: float) -> "SupervisorClient":
    # Imports Ray, which reads its environment once: only after the session has set it.
    from .supervisor_calls import SupervisorClient

    deadline = time.monotonic() + wait_s
    while True:
        try:
            return SupervisorClient.find(name)
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


def _session(name: str) -> RaySession:
    address = address_file.read(name)
    ray_address = os.environ.get("RAY_ADDRESS", "")
    if address is None and not ray_address:
        raise address_file.no_cluster(name, "here", address_file.names())
    check_installed("a command to a running cluster", ("ray",))
    if address is None:
        return join(ray_address, None)
    try:
        return join(
            address.ray_address, Path(address.token_path) if address.token_path else None, is_local=address.is_local
        )
    except Unavailable as e:
        if serving := address_file.serving_process(address):
            # The file has its address, so the remedy that join() names for RAY_ADDRESS does not apply.
            raise Unavailable(
                f"the cluster {name!r} runs (process {serving.pid}), but its Ray at {address.ray_address} cannot be "
                f"joined: try again, or end it with `kill {serving.pid}`"
            ) from e
        if not address.is_local:  # which may outlive its `diptych serve`, and be away for a while
            raise Unavailable(
                f"the Ray at {address.ray_address}, on which the cluster {name!r} was started, cannot be joined: try "
                "again once it answers. If it has ended, start the cluster again with `diptych serve`"
            ) from e
        if address.node not in ("", platform.node()):
            raise Unavailable(f"the cluster {name!r} was started on {address.node}: give the command there") from e
        address_file.remove(name)
        raise Unavailable(f"the cluster {name!r} has ended: start it again with `diptych serve`") from e
