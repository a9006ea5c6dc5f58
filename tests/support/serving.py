"""A serving loop of a few lines over the parts of a worker, for tests of what computes."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.block_manager import BlockManager
from diptych.workers.core.prefix_cache import PrefixCache
from diptych.workers.core.scheduler import Scheduler
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import SampledToken, Sequence
from diptych.workers.execution.model_runner import ModelRunner


@dataclass
class Server:
    """Runner with its scheduler; `outputs` holds the sampled tokens of each sequence."""

    runner: ModelRunner
    config: SchedulerConfig
    num_blocks: int | None = None
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        self.manager = BlockManager(self.num_blocks or self.runner.memory.num_blocks)
        self.cache = PrefixCache(self.manager, self.runner.layout.block_size, enabled=self.prefix_cache)
        self.scheduler = Scheduler(self.config, self.manager, self.cache)

    def generate(
        self, prompts: SequenceOf[SequenceOf[int]], samplings: SequenceOf[SamplingParams]
    ) -> list[list[SampledToken]]:
        """All prompts at once, each to its max_tokens; every block is accounted for at the end."""
        outputs: dict[Sequence, list[SampledToken]] = {}
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            request = Request(f"request-{i}", tuple(prompt), sampling, timeout_s=60.0)
            request.validate(self.runner.info.vocab_size, self.runner.info.max_context_tokens)
            sequence = Sequence(f"0/{i}", request, list(prompt), len(prompt), deadline=1e9, arrival=i)
            outputs[sequence] = []
            self.scheduler.add(sequence)
        while self.scheduler.has_work:
            self._step(outputs)
        assert self.manager.check_integrity([]) == 0
        return list(outputs.values())

    def _step(self, outputs: dict[Sequence, list[SampledToken]]) -> None:
        batch = self.scheduler.schedule()
        assert batch, "the scheduler is stuck"
        sampled = self.runner.launch(batch).tokens()
        assert [s.sequence for s in sampled] == [e.sequence for e in batch.entries if e.samples]
        for entry in batch.entries:
            sequence = entry.sequence
            first_block = sequence.num_computed // self.runner.layout.block_size
            sequence.num_computed += entry.num_new
            self.cache.insert(sequence, first_block)
        for token in sampled:
            token.sequence.token_ids.append(token.token_id)
            outputs[token.sequence].append(token)
            if token.sequence.num_output == token.sequence.request.sampling.max_tokens:
                self.scheduler.remove(token.sequence)
