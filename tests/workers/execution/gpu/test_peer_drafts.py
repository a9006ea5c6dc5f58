"""Models that draft on workers that share experts on devices: tokens and drafts are those of one worker on CPU, whatever
the others compute meanwhile."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ....support.gpu.peers import PeerRunner, peers, together
from ....support.heads import eagle3_config, make_eagle3, make_mtp
from ...conftest import CheckpointOf
from ..draft.conftest import DraftOf
from ..draft.test_draft_model import SAMPLINGS, answers, counts
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from .test_models_draft_on_device import MAX_RUNNING, SETTINGS, Answered, answered, skipping, untimed

METHODS = ("draft", "self", "eagle3", "mtp")
ENGINE: dict[str, Any] = {"chunk_tokens": 40, "max_running": MAX_RUNNING}


@pytest.fixture(scope="module")
def settings_of(
    checkpoint_of: CheckpointOf, draft_of: DraftOf, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    path, folder = checkpoint_of("mixtral"), tmp_path_factory.mktemp("heads")

    @cache
    def make(method: str) -> dict[str, Any]:
        if method == "self":
            return skipping(folder, 3, [1])
        if method == "draft":
            return {"draft_model": str(draft_of("mixtral", 0.1))}
        if method == "mtp":
            return {"draft_model": str(make_mtp(folder / "mtp", path, "deepseek", 5, alone=True))}
        from diptych.workers.models.families.registry import load_spec
        spec = load_spec(path)
        sizes = {"vocab_size": spec.vocab_size, "target_hidden_size": spec.hidden_size}
        config = eagle3_config("flat", eagle_aux_hidden_state_layer_ids=[0, 1, spec.num_layers], **sizes)
        return {"draft_model": str(make_eagle3(folder / "eagle3", config, 3))}

    return make


@pytest.fixture(scope="module")
def path(checkpoint_of: CheckpointOf) -> Path:
    return checkpoint_of("mixtral")


@pytest.fixture(scope="module")
def on_cpu(path: Path, settings_of: Any) -> Callable[..., Answered]:
    return cache(lambda method: answered(path, None, method, **settings_of(method)))


def drafted(of: PeerRunner, method: str | None) -> Answered:
    runner = of.runner
    if method is None:
        found = answers(Engine(runner, SchedulerConfig(**ENGINE)), runner.info.vocab_size, SAMPLINGS), None
    else:
        engine = untimed(runner, method, **ENGINE)
        found = answers(engine, runner.info.vocab_size, SAMPLINGS), counts(engine, method)
    runner.check()
    return found


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_one_drafts_beside_others(
    path: Path, settings_of: Any, on_cpu: Any, tmp_path: Path, method: str, graphs: bool
) -> None:
    """The other is idle; then it decodes without drafts; then it drafts too."""
    plain, expected = answered(path, None)[0], on_cpu(method)
    print(expected[1])
    assert expected[0] == plain and expected[1][0] > 60
    settings = SETTINGS | {"speculation": method, "cuda_graphs": graphs, "device": "fake"} | settings_of(method)
    with peers(path, tmp_path, **settings) as [first, second]:
        assert drafted(first, method) == expected
        found = together(drafted, [first, second], [method, None])
        assert found == [expected, (plain, None)]
        assert together(drafted, [first, second], [method] * 2) == [expected] * 2
