"""deploy/ray by Ray's own rules, and its two halves by each other's."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from diptych.cluster.common import config_file

FOLDER = Path(__file__).parents[2] / "deploy" / "ray"
KEY = "a key of the clients"


@pytest.fixture
def cluster() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "cluster.yaml").read_text())


def started(command: str, addresses: str) -> tuple[int, dict[str, str]]:
    """Run a start command where `ray` only prints its arguments, on a machine with `addresses`. Exit code, flags."""
    binary = "~/diptych-venv/bin/ray"
    assert binary in command
    script = f'hostname() {{ echo "{addresses}"; }}; ray() {{ printf "%s\\n" "$@"; env; }}; {command}'
    run = subprocess.run(
        ["bash", "-c", script.replace(binary, "ray")],
        env={"RAY_HEAD_IP": "192.168.1.10", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.removeprefix("--") for line in run.stdout.splitlines()]
    return run.returncode, dict(line.split("=", 1) for line in lines if "=" in line)


def test_ray_up_takes_it(cluster: dict[str, Any]) -> None:
    prepared = prepare_config(cluster)
    validate_config(prepared)
    assert prepared["max_workers"] == len(cluster["provider"]["worker_ips"])


def test_ray_up_would_refuse_a_mistake(cluster: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="head_start_commands"):
        validate_config(prepare_config(cluster | {"head_start_commands": []}))


def test_what_it_copies_is_there(cluster: dict[str, Any]) -> None:
    assert cluster["file_mounts"] == {"~/diptych": ".", "~/.ray/auth_token": "~/.ray/auth_token"}
    assert f"~/diptych/{'deploy/ray/cluster-config.yaml'}" in (FOLDER / "README.md").read_text()
    assert (FOLDER / "cluster-config.yaml").exists()


def test_every_machine_gets_the_label_that_a_pool_asks_for(cluster: dict[str, Any]) -> None:
    head_ip, worker_ips = cluster["provider"]["head_ip"], cluster["provider"]["worker_ips"]
    code, flags = started(cluster["head_start_ray_commands"][-1], head_ip)
    assert code == 0
    assert flags["node-ip-address"] == head_ip
    labels = [flags["labels"]]
    for ip in worker_ips:
        code, flags = started(cluster["worker_start_ray_commands"][-1], f"10.9.9.9 {ip} fe80::1")
        assert code == 0
        assert (flags["address"], flags["node-ip-address"]) == (f"{head_ip}:6379", ip)
        assert (flags["RAY_AUTH_MODE"], flags["RAY_worker_niceness"]) == ("token", "0")
        labels.append(flags["labels"])
    config = config_file.load(FOLDER / "cluster-config.yaml", {"router": {"api_key": KEY}})
    asked = [config.router.label_selector] * config.router.replicas
    for _, pool in config.pools.items():
        asked += [pool.label_selector] * pool.replicas
    assert sorted(labels) == sorted("=".join(item) for selector in asked for item in selector.items())


def test_a_machine_of_no_pool_does_not_start(cluster: dict[str, Any]) -> None:
    code, flags = started(cluster["worker_start_ray_commands"][-1], "10.9.9.9")
    assert code != 0
    assert "labels" not in flags
