"""On a Ray of others: labels place the pools, the cluster outlives its command, and `diptych stop` ends it."""

import json
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from diptych.cluster.placement.ray_session import make_token

from ..support.cluster_harness import (
    CLI,
    END_S,
    MODEL,
    StatusProcess,
    diptych,
    environment,
    lone_router,
    output_until_ready,
    survivors,
    wait_until,
)
from ..support.two_nodes import node_of, two_nodes

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

Status = Callable[[], dict[str, Any]]

SETTINGS = f"""
model: {MODEL}
name: joined
pools:
  prefill:
    kv_memory_bytes: 64MiB
    label_selector: {{diptych.io/pool: prefill}}
  decode:
    kv_memory_bytes: 64MiB
    label_selector: {{diptych.io/pool: decode}}
    resources: {{decoder: 1}}
router:
  http_port: 0
  grpc_port: 0
  worker_wait_s: 300  # a busy machine starts workers slowly
  label_selector: {{diptych.io/door: "yes"}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined")
    (folder / "cluster.yaml").write_text(SETTINGS)
    return folder


@pytest.fixture(scope="module")
def nodes(home: Path) -> Iterator[dict[str, str]]:
    with two_nodes(home) as found:
        yield found


@pytest.fixture(scope="module")
def command(home: Path, nodes: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    with served(home, nodes) as process:
        yield process


@contextmanager
def served(home: Path, nodes: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """A `diptych serve` that is ready there."""
    process = subprocess.Popen(
        [*CLI, "serve", "--config", "cluster.yaml"],
        env=environment(home) | nodes,
        cwd=home,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    output_until_ready(process)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def status(command: object, home: Path, nodes: dict[str, str]) -> Iterator[Status]:
    process = StatusProcess(home, nodes, "joined")
    yield process.ask
    process.close()


def test_pools_are_where_their_labels_say(status: Status, home: Path, nodes: dict[str, str]) -> None:
    found = status()
    places = {w["pool"]: node_of(w["pid"]) for w in found["workers"]}
    assert places["decode"] == nodes["OTHER_NODE"]
    assert places["prefill"] != nodes["OTHER_NODE"]
    assert node_of(found["routers"][0]["pid"]) == places["prefill"]


def test_a_second_cluster_needs_another_name(status: Status, home: Path, nodes: dict[str, str]) -> None:
    elsewhere = nodes | {"DIPTYCH_HOME": str(home / "elsewhere")}
    run = diptych(home, "serve", "--config", "cluster.yaml", env=elsewhere)
    assert run.returncode == 2
    assert "already runs on this Ray" in run.stderr
    run = diptych(home, "status", env=elsewhere)
    assert run.returncode == 3
    assert "no cluster named 'default' runs on this Ray. Those that run: joined" in run.stderr
    assert status()["state"] == "ready"


def test_a_pool_that_finds_no_room_says_what_it_waits_for(status: Status, home: Path, nodes: dict[str, str]) -> None:
    run = diptych(home, "scale", "decode=3", "--name", "joined", "--timeout", "1", env=nodes)
    assert run.returncode == 3
    assert "the pools do not have the new size after 1 s" in run.stderr
    expected = ["a node with CPU: 1, decoder: 1, diptych.io/pool: decode"]
    deadline = time.monotonic() + END_S
    while (waiting := [w["waiting_for"] for w in status()["workers"] if w["waiting_for"]]) != expected:
        assert time.monotonic() < deadline, waiting
    assert diptych(home, "scale", "decode=1", "--name", "joined", env=nodes).returncode == 0


def test_a_new_supervisor_gives_back_the_place_of_a_worker_that_died_meanwhile(
    status: Status, home: Path, nodes: dict[str, str]
) -> None:
    """The node has room for two decode workers: the successor fits only where the dead one was."""
    assert diptych(home, "scale", "decode=2", "--name", "joined", env=nodes).returncode == 0
    before = status()
    victim = next(w for w in before["workers"] if w["pool"] == "decode")
    os.kill(before["supervisor_pid"], signal.SIGKILL)
    os.kill(victim["pid"], signal.SIGKILL)
    assert diptych(home, "scale", "decode=2", "--name", "joined", env=nodes).returncode == 0
    after = status()
    assert after["state"] == "ready"
    assert after["supervisor_pid"] != before["supervisor_pid"]
    assert victim["pid"] not in {w["pid"] for w in after["workers"]}


def test_a_router_joins_and_drains_before_it_leaves(status: Status, home: Path, nodes: dict[str, str]) -> None:
    with lone_router(home, "--name", "joined", env=nodes) as (process, url):
        # A busy machine may not decode in time.
        wait_until(lambda: httpx.get(f"{url}/health/decode", timeout=60).status_code == 200, END_S)
        # The supervisor looks now and then.
        wait_until(lambda: any(w["num_decode_tokens"] for w in status()["workers"]), END_S)
        body = {"prompt": "A", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 503, END_S)
            assert httpx.get(f"{url}/health/decode", timeout=60).status_code == 503
            assert list(lines)[-2] == "data: [DONE]"
        assert process.stdout is not None
        assert process.stdout.read().strip() == "ended, no request was open"
        assert process.wait(END_S) == 0
    assert status()["state"] == "ready"


def test_a_machine_is_drained_without_a_failed_request(status: Status, home: Path, nodes: dict[str, str]) -> None:
    before = {w["worker_id"] for w in status()["workers"]}
    with lone_router(home, "--name", "joined", env=nodes) as (_, url), ThreadPoolExecutor() as clients:
        body = {"prompt": "A", "max_tokens": 100, "ignore_eos": True}
        answers = [clients.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=120) for _ in range(4)]
        run = diptych(home, "drain", "--name", "joined", env=nodes)
        assert (run.returncode, run.stdout) == (0, f"{len(before)} workers left {platform.node()}\n"), run.stderr
        for answer in answers:
            found = answer.result()
            assert found.status_code == 200, found.text
            assert found.json()["usage"]["completion_tokens"] == 100
    assert diptych(home, "scale", "decode=1", "--name", "joined", env=nodes).returncode == 0
    after = status()
    assert after["state"] == "ready"
    assert not before & {w["worker_id"] for w in after["workers"]}


def test_the_cluster_outlives_its_command_until_it_is_stopped(
    command: "subprocess.Popen[str]", status: Status, home: Path, nodes: dict[str, str]
) -> None:
    command.kill()
    command.wait()
    found = status()
    assert found["state"] == "ready"
    pids = [w["pid"] for w in found["workers"]] + [r["pid"] for r in found["routers"]] + [found["supervisor_pid"]]
    family = [psutil.Process(pid) for pid in pids]
    run = diptych(home, "stop", "--name", "joined", env=nodes)
    assert run.returncode == 0, run.stderr
    assert not survivors(family)
    assert diptych(home, "status", "--name", "joined").returncode == 3


def test_a_cluster_ends_whose_supervisor_died_just_before(home: Path, nodes: dict[str, str]) -> None:
    with served(home, nodes) as process:
        found = json.loads(diptych(home, "status", "--name", "joined", "--json", env=nodes).stdout)
        family = [psutil.Process(each["pid"]) for each in found["workers"] + found["routers"]]
        os.kill(found["supervisor_pid"], signal.SIGKILL)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
    assert len(family) == 3
    assert not survivors(family)


def test_an_address_where_no_ray_answers(home: Path) -> None:
    run = diptych(home, "serve", MODEL, env={"RAY_ADDRESS": "127.0.0.1:1"})
    assert run.returncode == 3
    assert "error: no Ray answers at 127.0.0.1:1" in run.stderr


def test_a_wrong_token_is_told(home: Path, nodes: dict[str, str]) -> None:
    wrong = str(make_token(home / "wrong.token"))
    run = diptych(home, "serve", MODEL, env=nodes | {"RAY_AUTH_TOKEN_PATH": wrong})
    assert run.returncode == 2
    assert f"does not accept the token of RAY_AUTH_TOKEN_PATH ({wrong})" in run.stderr
