"""Bugs to plant in steps launched ahead: see mutations.py."""

from dataclasses import replace
from typing import Any

from diptych.workers.core.block_manager import BlockManager
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


AHEAD = (blocks_come_free_beneath_a_launched_step, what_left_beneath_a_step_gets_its_token)
