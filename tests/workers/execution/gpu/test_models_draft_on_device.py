"""Models that draft on the CUDA engine, on a fake device: the tokens of an engine on CPU that has no drafts."""

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner

from ....support.gpu.serving import early, late, load
from ...conftest import CheckpointOf
from ..draft.conftest import DraftOf
from ..draft.test_draft_model import SAMPLINGS, Drafting, answers, counts

MAX_RUNNING = 8
SETTINGS: dict[str, Any] = {"max_running": MAX_RUNNING, "max_context_tokens": 256, "max_draft_tokens": 4}


def drafting(path: Path, device: Any, **changes: Any) -> ModelRunner:
    return load(path, device, **(SETTINGS | changes))


@pytest.fixture(scope="module")
def expected(checkpoint_of: CheckpointOf) -> list[list[int]]:
    plain = load(checkpoint_of("llama"), None, max_context_tokens=256)
    return answers(Engine(plain, SchedulerConfig()), plain.info.vocab_size, SAMPLINGS)


@pytest.mark.parametrize("make", [late, early])
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_a_draft_changes_no_token(
    checkpoint_of: CheckpointOf, draft_of: DraftOf, expected: list[list[int]], noise: float, make: Any
) -> None:
    runner = drafting(checkpoint_of("llama"), make(), speculation="draft", draft_model=str(draft_of("llama", noise)))
    engine = Drafting(runner, chunk_tokens=40, max_running=MAX_RUNNING).engine
    assert answers(engine, runner.info.vocab_size, SAMPLINGS) == expected
    drafted, accepted = counts(engine)
    assert drafted > 20
    if noise == 0.0:
        assert accepted > 0.75 * drafted


@pytest.mark.parametrize("make", [late, early])
def test_a_model_drafts_for_itself(
    checkpoint_of: CheckpointOf, tmp_path: Path, expected: list[list[int]], make: Any
) -> None:
    file = tmp_path / "skipped.json"
    file.write_text(json.dumps({"num_layers": 3, "skipped_layers": [1]}))
    runner = drafting(checkpoint_of("llama"), make(), speculation="self", skipped_layers=str(file))
    engine = Drafting(runner, chunk_tokens=40, max_running=MAX_RUNNING, method="self").engine
    assert answers(engine, runner.info.vocab_size, SAMPLINGS) == expected
