"""A process that stands for Ray's GCS, killed and started again as Ray starts its own."""

import errno
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from diptych.cluster.placement import gcs_keeper
from diptych.cluster.placement.gcs_keeper import PROCESS, GcsKeeper

from ...support.cluster_harness import END_S, wait_until

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)", "--gcs_server_port=0"]


@dataclass
class Info:
    process: Any


@dataclass
class Node:
    """What of Ray's Node a keeper uses."""

    gcs_address: str = "127.0.0.1:4321"
    kernel_fate_share: bool = True
    all_processes: dict[str, list[Any]] = field(default_factory=lambda: {PROCESS: [Info(subprocess.Popen(SLEEPER))]})

    @property
    def gcs(self) -> Any:
        return self.all_processes[PROCESS][0].process


def test_it_is_started_again_at_its_port_until_the_keeper_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_keeper, "RETRY_S", 0.0)
    node = Node()
    keeper = GcsKeeper(node)
    for _ in range(2):
        before = node.gcs
        before.kill()
        wait_until(lambda was=before: node.gcs is not was, END_S)
        assert node.gcs.args == [*SLEEPER[:-1], "--gcs_server_port=4321"]
        assert node.gcs.poll() is None
    keeper.close()
    last = node.gcs
    last.kill()
    keeper.join()
    assert node.gcs is last


def test_a_start_for_which_memory_is_short_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_keeper, "RETRY_S", 0.0)
    node, start, num_refused = Node(), GcsKeeper._start, 0

    def start_later(keeper: GcsKeeper) -> None:
        nonlocal num_refused
        if num_refused < 3:
            num_refused += 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        start(keeper)

    monkeypatch.setattr(GcsKeeper, "_start", start_later)
    keeper, before = GcsKeeper(node), node.gcs
    before.kill()
    wait_until(lambda: node.gcs is not before, END_S)
    assert num_refused == 3
    keeper.close()
    node.gcs.kill()
    keeper.join()
