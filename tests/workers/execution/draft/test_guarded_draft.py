"""A draft whose passes raise: answers are those without, nobody is resumed elsewhere, and it is turned off at last."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.workers.common.errors import DeviceLost, PeerLost
from diptych.workers.common.request import Request
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.draft.guarded_draft import ENOUGH, MOST_FAILURES, GuardedDraft
from diptych.workers.execution.model_runner import ModelRunner

from ....support.checkpoints import random_prompts
from ....support.engines import HANDOFF, assert_clean, run, tokens
from .test_draft_model import EXAMPLES, GREEDY, SAMPLINGS, Drafting, answers, counts
from .test_head_draft import HEADS
from .test_head_draft import load as load_any
from .test_self_draft import write

TINY = EXAMPLES / "tiny"
METHODS = ("draft", "self", "eagle3")
PASSES = ("compute", "store", "first", "further", "greedy")  # of a model; of a head


class Failing:
    """Stands before what computes a draft's passes. `is_bad`: of a pass's number, whether it raises `error`."""

    def __init__(self, of: Any, is_bad: Callable[[int], bool], error: Exception) -> None:
        self._of, self._is_bad, self._error = of, is_bad, error
        self.num_passes = self.num_raised = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        return found if name not in PASSES else lambda *args: self._pass(found, *args)

    def _pass(self, compute: Callable[..., Any], *args: Any) -> Any:
        result = compute(*args)
        if result is None and compute.__name__ == "greedy":  # not an option
            return None
        self.num_passes += 1
        if self._is_bad(self.num_passes):
            self.num_raised += 1
            raise self._error
        return result


def load(method: str, tmp_path: Path) -> ModelRunner:
    if method == "self":
        skipped = str(write(tmp_path / "skipped.json", 5, [2]))
        return load_any(TINY, method, skipped_layers=skipped)
    return load_any(TINY, method, HEADS.get(method, EXAMPLES / "tiny_draft"))


def guarded(runner: ModelRunner) -> GuardedDraft:
    assert isinstance(runner.proposer, GuardedDraft)
    return runner.proposer


def make_fail(runner: ModelRunner, is_bad: Callable[[int], bool], error: Exception | None = None) -> Failing:
    draft: Any = guarded(runner).draft
    name = "_passes" if hasattr(draft, "_passes") else "_decoder"
    failing = Failing(getattr(draft, name), is_bad, error or ValueError("a kernel does not like it"))
    setattr(draft, name, failing)
    return failing


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    plain = load_any(TINY, None)
    return answers(Engine(plain, SchedulerConfig()), plain.info.vocab_size, SAMPLINGS)


@pytest.mark.parametrize("bad", [1, 12])
@pytest.mark.parametrize("method", METHODS)
def test_a_pass_that_raises_costs_drafts_and_no_answer(
    expected: list[list[int]], tmp_path: Path, method: str, bad: int
) -> None:
    """Of prompts' chunks (1), of the first token of a draft or of a later one."""
    runner = load(method, tmp_path)
    failing = make_fail(runner, lambda number: number == bad)
    engine = Drafting(runner, chunk_tokens=40, max_running=3, method=method).engine
    assert answers(engine, runner.info.vocab_size, SAMPLINGS) == expected
    assert failing.num_raised == 1
    load_report = engine.check_integrity().load
    assert (load_report.num_draft_failures, load_report.is_draft_off, load_report.num_failed_steps) == (1, False, 0)
    assert counts(engine, method)[0] > 20  # of those that were not in the pass
    assert not guarded(runner)._failed  # sequences that have ended are forgotten


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_that_keeps_failing_is_turned_off_and_says_why(
    expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    runner = load(method, tmp_path)
    failing = make_fail(runner, lambda number: True)
    engine = Drafting(runner, chunk_tokens=40, max_running=2, method=method).engine
    assert answers(engine, runner.info.vocab_size, SAMPLINGS) == expected
    assert failing.num_passes == failing.num_raised == MOST_FAILURES
    load_report = engine.check_integrity().load
    assert (load_report.num_draft_failures, load_report.is_draft_off) == (MOST_FAILURES, True)
    assert not load_report.drafts
    told = [record for record in caplog.records if record.name == "diptych.worker" and record.levelname == "ERROR"]
    assert ["drafts no more" in record.getMessage() for record in told] == [True]
    assert told[0].exc_info is not None and "does not like it" in str(told[0].exc_info[1])


def test_failures_far_apart_do_not_turn_it_off(tmp_path: Path) -> None:
    runner = load("draft", tmp_path)
    engine, proposer = Drafting(runner).engine, guarded(runner)
    for i in range(2 * MOST_FAILURES):
        make_fail(runner, lambda number: number == 1)
        answers(engine, runner.info.vocab_size, SAMPLINGS[:1])
        assert proposer.num_failures == i + 1
        assert not proposer.is_off
        proposer._num_since = ENOUGH  # that so many calls went well


def test_what_a_failed_pass_was_to_compute_of_the_drafts_kv_does_not_count(tmp_path: Path) -> None:
    runner = load("draft", tmp_path)
    engine = Drafting(runner).engine
    make_fail(runner, lambda number: number == 3)  # the prompt's, the first token's, the second's
    prompt = tuple(random_prompts(3, [40], 2048)[0])
    engine.submit("0/0", Request("0", prompt, GREEDY, 60.0), [])
    engine.step()
    (sequence,) = engine._sequences.values()
    assert sequence.num_draft_computed == 40
    engine.step()
    assert (sequence.num_draft_computed, sequence.num_computed) == (40, 41)
    run(engine)
    assert sequence.num_draft_computed == 40
    assert_clean(engine)


def test_a_head_that_fails_at_a_handoff_leaves_its_entries_out(tmp_path: Path) -> None:
    runner = load("eagle3", tmp_path)
    engine = Drafting(runner, method="eagle3").engine
    prompt = tuple(random_prompts(3, [40], 2048)[0])
    engine.submit("0/0", Request("0", prompt, GREEDY, 60.0), [], handoff_id=HANDOFF)
    failing = make_fail(runner, lambda number: number == 2)
    outputs = run(engine)
    assert failing.num_raised == 1  # the entry of the prompt's last token
    (sealed,) = [event for o in outputs for event in o.handoffs if type(event).__name__ == "HandoffSealed"]
    assert (sealed.num_computed, sealed.num_draft_computed) == (40, 39)
    assert len(tokens(outputs, "0/0")) == 1
    engine.end_lease(HANDOFF)
    assert_clean(engine)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceLost),
        (PeerLost("rank 1 has ended"), PeerLost),
    ],
)
@pytest.mark.parametrize("bad", [1, 9])
def test_an_error_that_the_target_does_not_survive_is_raised(
    tmp_path: Path, error: Exception, raised: type[Exception], bad: int
) -> None:
    runner = load("draft", tmp_path)
    make_fail(runner, lambda number: number == bad, error)
    with pytest.raises(raised):
        answers(Drafting(runner).engine, runner.info.vocab_size, SAMPLINGS)
