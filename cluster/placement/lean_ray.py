"""A Ray of our own without what we never use: its GCS and its raylet, which place and watch actors.

ray.init starts six processes more, one after the other: an API server, an autoscaler's monitor, a log monitor, agents
for metrics and for runtime environments, and workers to be kept ready. They take 3 s of CPU at start, a share of a core
ever after, and half a gigabyte. All of it is private to Ray, and used in this file alone; with a version of Ray that it
was not tried with, `is_known` says no and ray.init is there.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import ray_agent

KNOWN_VERSIONS = ("2.60.",)
REGISTERED_S = 30.0
POLL_S = 0.005
_AGENTS = {
    "--dashboard_agent_command": ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    "--runtime_env_agent_command": ("runtime_env_agent_port",),
}
# Read by Ray's processes from their environment. Intervals in ms: what Ray does every 100 or 250.
SETTINGS = {
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_event_stats": "0",
    "RAY_memory_monitor_refresh_ms": "2000",
    "RAY_raylet_report_resources_period_milliseconds": "500",
    "RAY_raylet_check_for_unexpected_worker_disconnect_interval_ms": "5000",
}


def is_known() -> bool:
    """Return whether this version of Ray is one that `start` knows the inside of."""
    import ray

    return sys.platform == "linux" and ray.__version__.startswith(KNOWN_VERSIONS)


def start(temp_dir: Path, *, num_cpus: int, object_store_bytes: int) -> Any:
    """Ray's own Node: its `address`, and `kill_all_processes`. SETTINGS must be in the environment already."""
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class LeanNode(Node):
        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            self._webui_url = None

        def start_raylet(self, *args: Any, **kwargs: Any) -> None:
            with _raylet_command(services, without_agents):
                super().start_raylet(*args, **kwargs)
            # Ray checks once, and again after a second.
            until = time.monotonic() + REGISTERED_S
            gcs: Any = self.get_gcs_client()
            while not gcs.get_all_node_info() and time.monotonic() < until:
                time.sleep(POLL_S)

    make_params: Any = RayParams
    params = make_params(
        num_cpus=num_cpus,
        object_store_memory=object_store_bytes,
        temp_dir=str(temp_dir),
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )
    return LeanNode(params, head=True, shutdown_at_exit=False, spawn_reaper=True)


def without_agents(command: Sequence[str]) -> list[str]:
    """The raylet's command line, with nobody at work where it starts agents."""
    flags: dict[str, str] = {}
    for part in command:
        flag, _, flags[flag] = part.partition("=")
    base = [sys.executable, "-I", "-S", ray_agent.__file__, flags["--session_dir"], flags["--node_id"]]
    ours = {flag: subprocess.list2cmdline([*base, *names]) for flag, names in _AGENTS.items()}
    ours["--num_prestart_python_workers"] = "0"
    return [f"{flag}={ours[flag]}" if (flag := part.partition("=")[0]) in ours else part for part in command]


@contextmanager
def _raylet_command(services: Any, edit: Callable[[Sequence[str]], list[str]]) -> Generator[None]:
    original = services.start_ray_process

    def start_ray_process(command: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        return original(edit(command), *args, **kwargs)

    services.start_ray_process = start_ray_process
    try:
        yield
    finally:
        services.start_ray_process = original


def apply_settings() -> None:
    """Set Ray's environment variables; call it before Ray is first imported: its processes inherit them. Values that a
    person has set stay."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
