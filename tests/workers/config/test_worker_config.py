from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.errors import ConfigError
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.parallel.rendezvous import PeerGroup


@pytest.mark.parametrize(("device", "asked", "expected"), [("cpu", 0, 768), ("cuda:1", 0, 8192), ("cpu", 7, 7)])
def test_a_steps_budget_is_the_devices_unless_it_is_given(device: str, asked: int, expected: int) -> None:
    config = WorkerConfig("model", device=device, max_batch_tokens=asked)
    config.validate()
    assert config.scheduler().max_batch_tokens == expected


@pytest.mark.parametrize(("ranks", "experts", "copies"), [(1, 2, 0), (4, 2, 0), (2, 0, 0), (2, 2, -1)])
def test_all_ranks_have_whole_experts_or_none(ranks: int, experts: int, copies: int) -> None:
    WorkerConfig("model", tensor_parallel=4, expert_parallel=4, expert_copies=2).validate()
    with pytest.raises(ConfigError, match="expert_parallel must be 1 or" if copies == 0 else "expert_copies must be"):
        WorkerConfig("model", tensor_parallel=ranks, expert_parallel=experts, expert_copies=copies).validate()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data_parallel": 0}, "data_parallel must be in"),
        ({"data_parallel": 65}, "data_parallel must be in"),
        ({"data_rank": 2}, r"data_rank must be in \[0, 1\]"),
        ({"data_rank": -1}, "data_rank must be in"),
        ({"rendezvous": None}, "needs a rendezvous"),
        ({"tensor_parallel": 2}, "do not work together"),
        ({"device": "cuda"}, "works on cpu alone"),
        ({"look_ahead": True}, "look_ahead does not work with data_parallel"),
    ],
)
def test_workers_that_share_experts(wrong: dict[str, Any], message: str) -> None:
    config = WorkerConfig("model", data_parallel=2, data_rank=1, rendezvous="place")
    config.validate()
    assert config.peer_group == PeerGroup(1, 2, Path("place"))
    with pytest.raises(ConfigError, match=message):
        replace(config, **wrong).validate()


def test_ranks_do_not_look_ahead() -> None:
    WorkerConfig("model", look_ahead=True).validate()
    with pytest.raises(ConfigError, match="look_ahead works with one rank"):
        WorkerConfig("model", look_ahead=True, tensor_parallel=2).validate()
