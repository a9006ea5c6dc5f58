"""Models that draft on the CUDA engine, on a fake device: the tokens of an engine on CPU that has no drafts, and as
many drafts accepted as on CPU."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.core.draft import ModelDrafts, ModelProposer
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Sequence as Seq
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner

from ....support.drafters import FreeRows
from ....support.gpu.serving import early, late, load
from ...conftest import CheckpointOf
from ..draft.conftest import DraftOf
from ..draft.test_draft_model import SAMPLINGS, answers, counts
from ..draft.test_head_draft import HEADS, TINY

MAX_RUNNING = 8
SETTINGS: dict[str, Any] = {"max_running": MAX_RUNNING, "max_context_tokens": 256, "max_draft_tokens": 4}
Answered = tuple[list[list[int]], tuple[int, int] | None]  # tokens; how many were drafted, and accepted


def answered(path: Path, device: FakeDevice | None, method: str | None = None, **settings: Any) -> Answered:
    """Answers of an engine whose `method` always drafts; None: it has no drafts."""
    method_settings = {} if method is None else {"speculation": method}
    runner = load(path, device, **(SETTINGS | method_settings | settings))
    config: dict[str, Any] = {"chunk_tokens": 40, "max_running": MAX_RUNNING}
    if method is None:
        return answers(Engine(runner, SchedulerConfig(**config)), runner.info.vocab_size, SAMPLINGS), None
    engine = untimed(runner, method, **config)
    return answers(engine, runner.info.vocab_size, SAMPLINGS), counts(engine, method)


class Untimed:
    """A ModelProposer whose passes all take equally long, by what it says: so what is drafted depends on no clock."""

    def __init__(self, own: ModelProposer) -> None:
        self.own = own

    def propose(self, wanted: Sequence[tuple[Seq, int]]) -> ModelDrafts:
        made = self.own.propose(wanted)
        return ModelDrafts(made.drafts, [0.01])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def untimed(runner: ModelRunner, method: str, **config: Any) -> Engine:
    """Engine whose steps always draft."""
    assert runner.proposer is not None
    speculator = FreeRows(method, Untimed(runner.proposer), 4)
    for rows in range(1, 200):
        speculator.measured(rows, 1.0)
    return Engine(runner, SchedulerConfig(**config), drafter=speculator)


@pytest.fixture(scope="module")
def plain() -> Callable[[Path], list[list[int]]]:
    return cache(lambda path: answered(path, None)[0])


@pytest.fixture(scope="module")
def on_cpu() -> Callable[..., Answered]:
    return cache(lambda path, method, **settings: answered(path, None, method, **settings))


def skipping(folder: Path, num_layers: int, skipped: list[int]) -> dict[str, str]:
    file = folder / "skipped.json"
    file.write_text(json.dumps({"num_layers": num_layers, "skipped_layers": skipped}))
    return {"skipped_layers": str(file)}


WAYS = {"late": (late, True), "early": (early, True), "no graphs": (late, False)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_a_draft_changes_no_token(
    checkpoint_of: CheckpointOf, draft_of: DraftOf, plain: Any, on_cpu: Any, noise: float, way: str
) -> None:
    make, graphs = WAYS[way]
    path, draft = checkpoint_of("llama"), str(draft_of("llama", noise))
    found, counted = answered(path, make(), "draft", draft_model=draft, cuda_graphs=graphs)
    assert found == plain(path)
    assert counted == on_cpu(path, "draft", draft_model=draft)[1]
    assert counted is not None and counted[0] > 60


@pytest.mark.parametrize("way", WAYS)
def test_a_model_drafts_for_itself(tmp_path: Path, plain: Any, way: str) -> None:
    make, graphs = WAYS[way]
    settings = skipping(tmp_path, 5, [2])
    found, counted = answered(TINY, make(), "self", cuda_graphs=graphs, **settings)
    assert found == plain(TINY)
    assert counted == answered(TINY, None, "self", **settings)[1]
    assert counted is not None and counted[0] > 60


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", HEADS)
def test_heads_change_no_token(method: str, plain: Any, on_cpu: Any, way: str) -> None:
    """Their hidden states come from decode graphs, from prompts in pieces, and from large prompts."""
    (make, graphs), head = WAYS[way], str(HEADS[method])
    found, counted = answered(TINY, make(), method, draft_model=head, cuda_graphs=graphs)
    assert found == plain(TINY)
    assert counted == on_cpu(TINY, method, draft_model=head)[1]
    assert counted is not None and counted[0] > 60
