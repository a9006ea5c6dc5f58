"""Workers that share experts on devices: tokens are one worker's, whatever the others compute in the same steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ....support.gpu.peers import PeerRunner, peers, together
from ....support.gpu.serving import DRAWN, GREEDY, Cases, cases_of, generate, load
from ...conftest import CheckpointOf


@pytest.fixture(scope="module")
def cases(checkpoint_of: CheckpointOf) -> Cases:
    return cases_of(checkpoint_of("mixtral"))


def answers(of: PeerRunner, prompts: list[list[int]], **config: Any) -> list[list[int]]:
    """Answers of one worker, which is idle afterwards."""
    found = generate(of.runner, prompts, [GREEDY] * len(prompts), **config).token_ids
    of.runner.check()
    return found


@pytest.mark.parametrize("is_late", [True, False])
def test_an_idle_worker_launches_the_same_graphs(cases: Cases, tmp_path: Path, is_late: bool) -> None:
    path, prompts, expected = cases
    with peers(path, tmp_path, is_late=is_late) as [first, second]:
        captured = second.device.num_captured
        assert answers(first, prompts) == expected
        assert first.steps == second.steps and second.num_served == len(second.steps)
        in_graphs = [step for step in second.steps if not step.has_prompts]
        assert {step.num_rows for step in in_graphs} == {4} and len(in_graphs) == GREEDY.max_tokens - 1
        assert second.device.num_replayed == len(in_graphs)
        assert second.device.num_captured == captured
        assert answers(second, prompts) == expected
