"""Bugs to plant in steps launched ahead: see mutations.py."""

from dataclasses import replace
from typing import Any

from diptych.workers.core import scheduler
from diptych.workers.core.block_manager import BlockManager
from diptych.workers.core.sequence import Batch
from diptych.workers.engine.step_pipeline import StepPipeline

from .mutations import Replacement


def blocks_come_free_beneath_a_launched_step() -> list[Replacement]:
    return [(BlockManager, "begin_step", lambda self: None), (BlockManager, "end_step", lambda self: None)]


def what_left_beneath_a_step_gets_its_token() -> list[Replacement]:
    real = StepPipeline.finish

    def finish(self: StepPipeline, here: Any) -> Any:
        launched = (entry.sequence for step in self._steps for entry in step.batch.entries)
        done = real(self, {sequence.key: sequence for sequence in launched})
        entries = [e for e in done.batch.entries if here.get(e.sequence.key) is e.sequence]
        num_decodes = min(done.batch.num_decodes, len(entries))
        return replace(done, batch=replace(done.batch, entries=entries, num_decodes=num_decodes))

    return [(StepPipeline, "finish", finish)]


def one_that_waits_for_an_answer_decodes_on() -> list[Replacement]:
    real = scheduler.decode_on

    def decode_on(under_way: Batch, *args: Any, **kwargs: Any) -> Any:
        waiting = {e.sequence: e.sequence.provisional for e in under_way.entries if e.sequence.provisional is not None}
        for sequence in waiting:
            sequence.provisional = None
        found = real(under_way, *args, **kwargs)
        for sequence, provisional in waiting.items():
            sequence.provisional = provisional
        return found

    return [(scheduler, "decode_on", decode_on)]


AHEAD = (
    blocks_come_free_beneath_a_launched_step,
    what_left_beneath_a_step_gets_its_token,
    one_that_waits_for_an_answer_decodes_on,
)
