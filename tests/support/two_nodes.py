"""A Ray of two nodes on this machine, for a test to join (e2e/ray_nodes.py)."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from diptych.cluster.placement.ray_session import make_token

from .cluster_harness import END_S, environment

SCRIPT = Path(__file__).parents[1] / "e2e" / "ray_nodes.py"


@contextmanager
def two_nodes(home: Path) -> Iterator[dict[str, str]]:
    """A Ray of two nodes, on loopback, with a token; the environment that joins it, and the id of the other node than
    the head's as OTHER_NODE. Whatever the test did, nothing of it is there afterwards."""
    ray = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(make_token(home / "ray.token")),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        env=environment(home) | ray | {"RAY_enable_metrics_collection": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        started = json.loads(process.stdout.readline())
        yield ray | {"RAY_ADDRESS": started["address"], "OTHER_NODE": started["other"]}
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.stdin.close()
        process.stdout.close()
        process.wait(END_S)
        for victim in psutil.wait_procs(family, timeout=10.0)[1]:
            victim.kill()


def node_of(pid: int) -> str:
    """The id of the Ray node that started a process."""
    raylet = psutil.Process(pid).parent()
    assert raylet is not None
    return next(arg.partition("=")[2] for arg in raylet.cmdline() if arg.startswith("--node_id="))
