"""Bugs to plant in steps launched ahead: see mutations.py."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from diptych.workers.core import scheduler
from diptych.workers.core.block_manager import BlockManager
from diptych.workers.core.sequence import KNOWN, Batch, ScheduledSequence, everybody
from diptych.workers.core.step_ahead import StepAhead
from diptych.workers.engine.step_pipeline import StepPipeline
from diptych.workers.grammar.matcher import Matcher

from .mutations import Replacement


def blocks_come_free_beneath_a_launched_step() -> list[Replacement]:
    return [(BlockManager, "begin_step", lambda self: None), (BlockManager, "end_step", lambda self: None)]


def what_left_beneath_a_step_gets_its_token() -> list[Replacement]:
    real = StepPipeline.finish

    def finish(self: StepPipeline, here: Any, tell: Any) -> Any:
        launched = (entry.sequence for step in self._steps for entry in step.batch.entries)
        done = real(self, {sequence.key: sequence for sequence in launched}, tell)
        entries = [e for e in done.batch.entries if here.get(e.sequence.key) is e.sequence]
        num_decodes = min(done.batch.num_decodes, len(entries))
        return replace(done, batch=replace(done.batch, entries=entries, num_decodes=num_decodes))

    return [(StepPipeline, "finish", finish)]


def one_that_waits_for_an_answer_decodes_on() -> list[Replacement]:
    real = scheduler.follow

    def follow(under_way: Batch, *args: Any, **kwargs: Any) -> Any:
        waiting = {e.sequence: e.sequence.provisional for e in under_way.entries if e.sequence.provisional is not None}
        for sequence in waiting:
            sequence.provisional = None
        found = real(under_way, *args, **kwargs)
        for sequence, provisional in waiting.items():
            sequence.provisional = provisional
        return found

    return [(scheduler, "follow", follow)]


def a_prompt_goes_on_where_the_step_under_way_began() -> list[Replacement]:
    def batch(self: StepAhead, entries: list[ScheduledSequence], copies: list[tuple[int, int]]) -> Batch:
        known = [KNOWN] * (len(entries) - len(self.decodes))
        return Batch.of(entries, len(self.decodes), copies, previous_entries=self.previous_entries + known)

    return [(StepAhead, "batch", batch)]


def prompts_look_as_before_the_step_under_way() -> list[Replacement]:
    return [(StepAhead, "recorded", lambda self: nullcontext())]


def a_step_ahead_is_sampled_with_its_launch() -> list[Replacement]:
    real = StepPipeline._launch

    def launch(self: StepPipeline, batch: Batch, tell: Any) -> None:
        real(self, batch, tell)
        self._steps[-1].launched.sample(everybody)

    return [(StepPipeline, "_launch", launch)]


def who_gets_a_run_is_in_the_step_ahead() -> list[Replacement]:
    return [(Matcher, "has_run", False)]


AHEAD = (
    blocks_come_free_beneath_a_launched_step,
    what_left_beneath_a_step_gets_its_token,
    one_that_waits_for_an_answer_decodes_on,
    a_prompt_goes_on_where_the_step_under_way_began,
    prompts_look_as_before_the_step_under_way,
    a_step_ahead_is_sampled_with_its_launch,
    who_gets_a_run_is_in_the_step_ahead,
)
