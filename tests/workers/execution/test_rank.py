"""What ranks do before they wait for one another, which has a time limit: kernels are compiled first."""

import os
import select
from pathlib import Path
from unittest.mock import patch

import pytest

from diptych.workers.common.errors import RankLost
from diptych.workers.execution.gpu.gpu_loader import GpuWeights
from diptych.workers.execution.rank_work import follow
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.kv_plan import layout_of
from diptych.workers.models.plan.rank_settings import READY, RankSettings
from diptych.workers.ranks.rank_processes import RankProcesses

from ...support.gpu.serving import late, load


def test_a_rank_is_ready_when_its_largest_step_was_computed(llama: Path) -> None:
    """That compiles kernels. Rank 0 waits for as long as it takes until all are ready, and then for a minute."""
    layout = layout_of(load_spec(llama), "float32", 16, model_id="m", tensor_parallel=2)
    read, write = os.pipe()
    go_line, worker = os.pipe()
    settings = RankSettings(str(llama), layout, "float32", 64, 1, 2, device="fake", rank=1)
    was_ready: list[bool] = []

    def step_bytes(_: GpuWeights) -> int:
        was_ready.append(bool(select.select([read], [], [], 0)[0]))
        return 0

    os.close(worker)  # it ends
    with patch.object(GpuWeights, "step_bytes", step_bytes), pytest.raises(RankLost, match="has ended"):
        follow(settings, write, go_line)
    assert was_ready == [False] and os.read(read, 100) == READY
    for descriptor in (read, write, go_line):
        os.close(descriptor)


@pytest.mark.slow
def test_rank_0_computes_its_own_before_it_joins_the_others(llama: Path) -> None:
    order: list[str] = []
    step_bytes, join = GpuWeights.step_bytes, RankProcesses.join

    def computed(weights: GpuWeights) -> int:
        order.append("computed")
        return step_bytes(weights)

    def joined(*arguments: object) -> object:
        order.append("joined")
        return join(*arguments)  # type: ignore[arg-type]

    with patch.object(GpuWeights, "step_bytes", computed), patch.object(RankProcesses, "join", joined):
        load(llama, late(), tensor_parallel=2).close()
    assert order == ["computed", "joined"]
