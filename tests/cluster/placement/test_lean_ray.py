"""Ray's command lines, without what we never use."""

import os
import sys
from pathlib import Path

import pytest

from diptych.cluster.placement import lean_ray, ray_agent

RAYLET = [
    "/ray/raylet",
    "--session_dir=/tmp/s",
    "--node_id=abc",
    "--python_worker_command=python -c x=1",
    "--head",
    "--num_prestart_python_workers=64",
    "--dashboard_agent_command=python -u agent.py --listen-port=0",
    "--runtime_env_agent_command=python -u main.py",
]


def test_a_raylet_starts_neither_agents_nor_idle_workers() -> None:
    agent = f"{sys.executable} -I -S {ray_agent.__file__} /tmp/s abc"
    assert lean_ray.without_agents(RAYLET) == [
        *RAYLET[:5],
        "--num_prestart_python_workers=0",
        f"--dashboard_agent_command={agent} metrics_agent_port metrics_export_port dashboard_agent_listen_port",
        f"--runtime_env_agent_command={agent} runtime_env_agent_port",
    ]


def test_an_agent_says_that_its_services_are_not_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)  # its raylet has ended, so it does not wait
    monkeypatch.setattr(ray_agent, "end_with_parent", lambda: None)
    ray_agent.main(str(tmp_path), "abc", ["one_port", "two_port"])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"one_port_abc": "-1", "two_port_abc": "-1"}


def test_what_a_person_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RAY_event_stats": "1"})
    lean_ray.apply_settings()
    assert os.environ == lean_ray.SETTINGS | {"RAY_event_stats": "1"}
