"""What an engine's load report says of late prompts, and of the drafts that it verified."""

from dataclasses import replace

import pytest

from diptych.proto import worker_pb2
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.load import MAX_YIELD, EngineLoad
from diptych.workers.testing.fake_runner import FakeRunner

from ...support.sequences import make_request


def make() -> EngineLoad:
    runner = FakeRunner()
    engine = Engine(runner, SchedulerConfig())
    return EngineLoad(runner, engine.manager, engine.scheduler, engine.outgoing, engine.incoming, lambda: 0.0)


def test_an_engine_without_drafts_reports_none() -> None:
    report = make().report()
    assert not report.drafts and not report.draft_yields and not report.num_draft_tokens_anew


def test_the_tokens_of_late_prompts_are_named() -> None:
    runner = FakeRunner()
    engine = Engine(runner, SchedulerConfig(max_batch_tokens=16), clock=lambda: 100.0)
    for key, received_at in (("0/1", 90.0), ("0/2", 100.0)):
        engine.submit(key, replace(make_request([1] * 40, 4), received_at=received_at), [])
    load = EngineLoad(runner, engine.manager, engine.scheduler, engine.outgoing, engine.incoming, lambda: 100.0)
    report = load.report()
    assert (report.num_waiting_tokens, report.num_late_tokens) == (80, 0)  # no step has looked at the time yet
    engine.step()
    report = load.report()
    assert (report.num_waiting_tokens, report.num_late_tokens) == (64, 40)


def test_verified_drafts_are_counted_by_method_and_by_what_they_yield() -> None:
    load = make()
    for method, num_drafted, num_accepted in (("ngram", 4, 0), ("ngram", 5, 3), ("suffix", 16, 16), ("ngram", 3, 3)):
        load.verified(method, num_drafted, num_accepted)
    report = load.report()
    assert list(report.drafts) == [
        worker_pb2.DraftCounts(method="ngram", num_drafted=12, num_accepted=6),
        worker_pb2.DraftCounts(method="suffix", num_drafted=16, num_accepted=16),
    ]
    assert list(report.draft_yields) == [1, 0, 0, 2, *[0] * 12, 1] and len(report.draft_yields) == MAX_YIELD


@pytest.mark.parametrize("counts", [(3, 4), (17, 0), (3, -1)])
def test_counts_that_no_verification_has_are_a_bug(counts: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        make().verified("ngram", *counts)
