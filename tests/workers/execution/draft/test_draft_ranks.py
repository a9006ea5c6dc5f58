"""Drafts of models over real ranks: answers are those without drafts, and a rank that is lost ends its worker."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from torch import Tensor

from diptych.workers.common.errors import CheckpointError, ConfigError, RankLost
from diptych.workers.common.request import Request
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.common.backend import StepDecoder
from diptych.workers.execution.common.ranked_decoder import RankedDecoder
from diptych.workers.execution.draft.draft_model import DraftModel
from diptych.workers.execution.draft.draft_source import DraftSource
from diptych.workers.execution.draft.guarded_draft import GuardedDraft
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.layout import KVLayout
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.layers.step import Step

from ....support.checkpoints import make_checkpoint
from ....support.drafters import EveryDraft
from ...conftest import CheckpointOf
from .test_draft_model import EXAMPLES, GREEDY, SAMPLINGS, answers, counts
from .test_self_draft import write

END_S = 20.0  # for a process that must end; no test passes by waiting
TINY = EXAMPLES / "tiny"
MODELS = {"draft": "tiny_draft", "eagle3": "tiny_eagle3", "mtp": "tiny_mtp"}


def settings_of(method: str, folder: Path) -> dict[str, Any]:
    if method == "self":  # the first layer, the last one, and one between
        return {"speculation": "self", "skipped_layers": str(write(folder / "skipped.json", 5, [0, 2, 4]))}
    return {"speculation": method, "draft_model": str(EXAMPLES / MODELS[method])}


@contextmanager
def loaded(path: Path, num_ranks: int, settings: dict[str, Any], **changes: Any) -> Iterator[ModelRunner]:
    """A worker of so many processes."""
    own = {"dtype": "float32", "max_context_tokens": 256, "kv_memory_bytes": 64 << 20, "threads": num_ranks}
    config = WorkerConfig.of(path, tensor_parallel=num_ranks, **own, **settings)
    runner = ModelRunner.load(config.changed(**changes))
    try:
        yield runner
    finally:
        runner.close()


def compare(path: Path, method: str, settings: dict[str, Any], **changes: Any) -> KVLayout:
    """Compare two ranks' answers with drafts and without, and their drafts with those of one rank by torch. Returns
    the layout of the two."""
    with loaded(path, 1, settings, cpu_isa="none") as alone:
        engine = drafting(alone, method)
        answers(engine, alone.info.vocab_size, SAMPLINGS[:4])
        due = counts(engine, method)
    with loaded(path, 2, settings, **changes) as runner:
        vocab_size = runner.info.vocab_size
        expected = answers(Engine(runner, SchedulerConfig()), vocab_size, SAMPLINGS[:4])
        engine = drafting(runner, method)
        assert answers(engine, vocab_size, SAMPLINGS[:4]) == expected
        assert counts(engine, method) == due
        assert due[0] > 60
        return runner.layout


def drafting(runner: ModelRunner, method: str) -> Engine:
    """An engine whose drafts do not depend on how long passes take: on two ranks they are those of one."""
    assert runner.proposer is not None
    return Engine(runner, SchedulerConfig(chunk_tokens=40), drafter=EveryDraft(method, runner.proposer))


def model_of(runner: ModelRunner) -> DraftModel:
    """The model that drafts, without its guard."""
    assert isinstance(runner.proposer, GuardedDraft)
    model = runner.proposer.draft
    assert isinstance(model, DraftModel)
    return model


def ranks_of_draft(layout: KVLayout) -> list[int]:
    """Number of ranks that the heads of each group of a draft's layers are divided over."""
    if not layout.num_draft_layers:
        return []
    groups = layout.layer_groups(layout.num_target_layers, layout.num_draft_layers)
    return [of.uniform.tensor_parallel for of in groups]


@pytest.mark.parametrize(
    ("method", "changes", "num_ranks"),
    [
        ("draft", {}, [2]),
        pytest.param("draft", {"cpu_isa": "none"}, [2], marks=pytest.mark.long),
        pytest.param("draft", {"draft_tensor_parallel": 1}, [1], marks=pytest.mark.long),
        pytest.param("draft", {"draft_tensor_parallel": 1, "cpu_isa": "none"}, [1], marks=pytest.mark.long),
        ("self", {}, []),
        pytest.param("self", {"cpu_isa": "none"}, [], marks=pytest.mark.long),
        ("eagle3", {}, [1]),
        pytest.param("eagle3", {"cpu_isa": "none"}, [1], marks=pytest.mark.long),
        pytest.param("mtp", {}, [1], marks=pytest.mark.long),
        pytest.param("mtp", {"cpu_isa": "none"}, [1], marks=pytest.mark.long),
    ],
)
def test_answers_are_those_without_drafts(
    method: str, changes: dict[str, Any], num_ranks: list[int], tmp_path: Path
) -> None:
    layout = compare(TINY, method, settings_of(method, tmp_path), **changes)
    assert ranks_of_draft(layout) == num_ranks


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "changes"),
    [("gemma3", {}), ("gemma3", {"cpu_isa": "none"}), ("mixtral", {"expert_parallel": 2}), ("deepseek-v3", {})],
)
def test_other_models_draft_for_themselves(
    checkpoint_of: CheckpointOf, tmp_path: Path, arch: str, changes: dict[str, Any]
) -> None:
    """Norms after layers, experts that ranks hold whole, latent attention."""
    path = checkpoint_of(arch)
    num_layers = load_spec(path).num_layers
    skipped = write(tmp_path / "skipped.json", num_layers, [1])
    compare(path, "self", {"speculation": "self", "skipped_layers": str(skipped)}, **changes)


def test_heads_that_two_ranks_cannot_share_are_refused_or_computed_by_the_first(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96}
    draft = make_checkpoint(tmp_path / "three", "llama", 5, **sizes)
    settings = {"speculation": "draft", "draft_model": str(draft)}
    message = r"the draft .*three cannot be shared by 2 ranks: .*3 attention heads.*draft_tensor_parallel to 1"
    with pytest.raises(ConfigError, match=message), loaded(checkpoint_of("llama"), 2, settings):
        pass
    layout = compare(checkpoint_of("llama"), "draft", settings, draft_tensor_parallel=1)
    assert ranks_of_draft(layout) == [1]


class Killing:
    """A StepDecoder of rank 0: another rank is killed once it has the message of a pass."""

    def __init__(self, decoder: StepDecoder, ranks: list[psutil.Process]) -> None:
        self._decoder, self._ranks = decoder, ranks
        self.sampler = decoder.sampler

    def compute(self, step: Step) -> Tensor | None:
        for process in self._ranks:
            process.kill()
        return self._decoder.compute(step)


@pytest.mark.parametrize("isa", ["auto", pytest.param("none", marks=pytest.mark.long)])
def test_a_rank_that_is_killed_in_a_pass_ends_the_worker_by_its_name(isa: str, tmp_path: Path) -> None:
    lost: list[RankLost] = []
    config = WorkerConfig.of(TINY, tensor_parallel=2, threads=2, cpu_isa=isa, kv_memory_bytes=64 << 20)
    before = psutil.Process().children()
    runner = ModelRunner.load(config.changed(**settings_of("draft", tmp_path)), on_loss=lost.append)
    ranks = [process for process in psutil.Process().children() if process not in before]
    assert len(ranks) == 1
    engine, model = drafting(runner, "draft"), model_of(runner)
    assert isinstance(model._decoder, RankedDecoder)
    engine.submit("0/0", Request("0", tuple(range(5, 30)), GREEDY, 60.0), [])
    engine.step()  # the prompt, of both models
    model._decoder = replace(model._decoder, decoder=Killing(model._decoder.decoder, ranks))
    with pytest.raises(RankLost, match="rank 1 was killed by SIGKILL: all 2 ranks of the worker end with it"):
        engine.step()
    assert [str(error) for error in lost] == ["rank 1 was killed by SIGKILL: all 2 ranks of the worker end with it"]
    assert not any(process.is_running() for process in ranks)
    runner.close()


def test_ranks_end_with_rank_0_while_it_loads_what_drafts() -> None:
    """They wait for that without a deadline."""
    code = f"""
import sys, time
from diptych.workers.execution.draft.draft_source import DraftSource
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.config.worker_config import WorkerConfig

def load(*_):
    print("loads", flush=True)
    time.sleep(1000)

DraftSource.load = load
config = WorkerConfig.of({str(TINY)!r}, tensor_parallel=2, threads=2, kv_memory_bytes=64 << 20)
ModelRunner.load(config.changed(speculation="draft", draft_model={str(EXAMPLES / "tiny_draft")!r}))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "loads\n"
        ranks = psutil.Process(worker.pid).children()
        assert len(ranks) == 1 and ranks[0].is_running()
        worker.kill()
        assert not psutil.wait_procs(ranks, END_S)[1]


def test_ranks_end_where_what_drafts_cannot_be_loaded(tmp_path: Path) -> None:
    before = psutil.Process().children()

    def load(*_: object) -> None:
        raise CheckpointError("the draft is broken")

    is_refused = pytest.raises(CheckpointError, match="the draft is broken")
    with patch.object(DraftSource, "load", load), is_refused, loaded(TINY, 2, settings_of("draft", tmp_path)):
        pass
    assert psutil.Process().children() == before


def test_a_rank_that_is_killed_while_rank_0_loads_what_drafts_is_named(tmp_path: Path) -> None:
    """Though the backend, which is built by then, is closed before the ranks are."""
    before = psutil.Process().children()
    load = DraftSource.load

    def killing(*arguments: Any) -> Any:
        for process in psutil.Process().children():
            if process not in before:
                process.kill()
        return load(*arguments)

    is_named = pytest.raises(RankLost, match="rank 1 was killed by SIGKILL")
    with patch.object(DraftSource, "load", killing), is_named, loaded(TINY, 2, settings_of("draft", tmp_path)):
        pass


def test_a_pass_that_fails_on_rank_0_ends_all_ranks(tmp_path: Path) -> None:
    """The others wait in the midst of it, and would mistake the next message for the rest."""

    class Failing(Killing):
        def compute(self, step: Step) -> Tensor | None:
            raise MemoryError("no room")

    with loaded(TINY, 2, settings_of("self", tmp_path)) as runner:
        engine, model = drafting(runner, "self"), model_of(runner)
        assert isinstance(model._decoder, RankedDecoder)
        model._decoder = replace(model._decoder, decoder=Failing(model._decoder.decoder, []))
        engine.submit("0/0", Request("0", tuple(range(5, 30)), GREEDY, 60.0), [])
        engine.step()
        with pytest.raises(RankLost, match=r"rank 0 failed in a pass of the draft \(no room\): all 2 ranks"):
            engine.step()
