"""Drafts by the target's own layers without some of them: answers are those without; which layers, a search says."""

import json
from pathlib import Path

import pytest

from diptych.workers.common.errors import ConfigError
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.cpu.compiled_steps import runs_between
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.execution.skip_search import best_length, search

from ....support.drafters import EveryDraft
from ...conftest import CheckpointOf
from .test_draft_model import EXAMPLES, SAMPLINGS, Drafting, answers, counts

TINY = EXAMPLES / "tiny"


def load(path: Path, skipped: Path | None, isa: str) -> ModelRunner:
    config = WorkerConfig.of(path, dtype="float32", max_context_tokens=256, cpu_isa=isa, kv_memory_bytes=64 << 20)
    drafting = {"speculation": "self", "skipped_layers": str(skipped)} if skipped is not None else {}
    return ModelRunner.load(config.changed(**drafting))


def write(file: Path, num_layers: int, skipped: list[int]) -> Path:
    file.write_text(json.dumps({"num_layers": num_layers, "skipped_layers": skipped}))
    return file


@pytest.mark.parametrize("isa", ["auto", "none"])
@pytest.mark.parametrize("skipped", [[2], [0, 3, 4]])
def test_answers_are_those_without_drafts(tmp_path: Path, skipped: list[int], isa: str) -> None:
    plain = load(TINY, None, isa)
    expected = answers(Engine(plain, SchedulerConfig()), plain.info.vocab_size, SAMPLINGS)
    runner = load(TINY, write(tmp_path / "skipped.json", 5, skipped), isa)
    drafting = Drafting(runner, chunk_tokens=40, method="self")
    assert answers(drafting.engine, runner.info.vocab_size, SAMPLINGS) == expected
    drafted, accepted = counts(drafting.engine, "self")
    assert drafted > 60
    if skipped == [2]:
        assert accepted > 0.2 * drafted
    assert runner.layout.num_draft_layers == 0  # it reads the target's KV


@pytest.mark.parametrize("arch", ["mixtral", "deepseek-v3"])
def test_mixtures_and_latent_attention(checkpoint_of: CheckpointOf, tmp_path: Path, arch: str) -> None:
    path = checkpoint_of(arch)
    plain = load(path, None, "auto")
    expected = answers(Engine(plain, SchedulerConfig()), plain.info.vocab_size, SAMPLINGS)
    runner = load(path, write(tmp_path / "skipped.json", plain.layout.num_layers, [1]), "auto")
    assert answers(Drafting(runner, method="self").engine, runner.info.vocab_size, SAMPLINGS) == expected


def test_what_a_layer_leaves_before_skipped_ones_has_its_own_norm(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    """Of norms after layers the kernels leave the last one to the next layer: their drafts are torch's."""
    found: list[tuple[int, int]] = []
    for isa in ("auto", "none"):
        runner = load(checkpoint_of("gemma3"), write(tmp_path / "skipped.json", 3, [1]), isa)
        assert runner.proposer is not None
        engine = Engine(runner, SchedulerConfig(), drafter=EveryDraft("self", runner.proposer))
        answers(engine, runner.info.vocab_size, SAMPLINGS[:4])
        found.append(counts(engine, "self"))
    assert found[0] == found[1] and found[0][1] > 0


def test_a_file_that_does_not_fit_the_model_is_refused_by_name(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    file = tmp_path / "skipped.json"
    with pytest.raises(ConfigError, match=r"skipped.json cannot be read \(No such file.*skip_search"):
        load(TINY, file, "none")
    for text in ("[]", "{", '{"num_layers": 5}', '{"num_layers": 5, "skipped_layers": ["a"]}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="has no num_layers and skipped_layers"):
            load(TINY, file, "none")
    with pytest.raises(ConfigError, match=r"made for a model of 30 layers, and .*tiny has 5"):
        load(TINY, write(file, 30, [2]), "none")
    for skipped in ([], [5], [-1, 2], [0, 1, 2, 3, 4]):
        with pytest.raises(ConfigError, match="must name some of the layers 0 to 4, but not all"):
            load(TINY, write(file, 5, skipped), "none")
    with pytest.raises(ConfigError, match="gemma4 cannot draft for itself"):
        load(checkpoint_of("gemma4"), write(file, 6, [1]), "none")


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_the_search_finds_a_layer_that_says_little(device: str) -> None:
    num_layers, found = search(WorkerConfig.of(TINY, dtype="float32", cpu_isa="none", device=device), None, 12)
    assert num_layers == 5 and found
    assert all(0.0 <= each.acceptance <= 1.0 and each.pass_share > 0 for each in found)
    assert [len(each.skipped) for each in found] == list(range(1, len(found) + 1))


@pytest.mark.parametrize(
    ("acceptance", "share", "speed_up", "length"),
    [(0.0, 0.5, 1.0, 0), (1.0, 0.5, 17 / 9, 16), (0.5, 0.25, 1.2, 1), (0.9, 1.0, 1.0, 0)],
)
def test_the_best_length_of_drafts(acceptance: float, share: float, speed_up: float, length: int) -> None:
    assert best_length(acceptance, share) == (pytest.approx(speed_up), length)


@pytest.mark.parametrize(
    ("skipped", "runs"),
    [([2], [(0, 2), (3, 5)]), ([0], [(0, 0), (1, 5)]), ([4], [(0, 4)]), ([1, 2], [(0, 1), (3, 5)])],
)
def test_runs_of_the_layers_that_are_left(skipped: list[int], runs: list[tuple[int, int]]) -> None:
    assert runs_between(skipped, 5) == runs
