"""A FakeRunner that keeps the KV of a model that drafts, too, and an engine that counts it."""

from diptych.workers.core.draft_kv import DraftKV
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.engine.engine import Engine
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.testing.fake_stream import FakeStep

from .engines import Clock

NUM_LAYERS = 3  # of the target
NUM_DRAFT_LAYERS = 2


class DraftRunner(FakeRunner):
    """A step stores the draft's KV of its sequences' tokens that lack it, except while `drafts` is off. In the slot of
    a draft layer K is the token's id, and V its position, negative."""

    def __init__(
        self,
        num_draft_layers: int = NUM_DRAFT_LAYERS,
        draft_id: str = "draft",
        *,
        num_blocks: int = 64,
        block_size: int = 4,
    ) -> None:
        self.num_draft_layers, self.draft_id = num_draft_layers, draft_id if num_draft_layers else ""
        super().__init__(num_blocks=num_blocks, block_size=block_size, num_layers=NUM_LAYERS)
        self.draft_kv: DraftKV | None = None  # of its engine
        self.drafts = True
        self.counted: list[tuple[int, int]] = []  # (num_computed, num_draft_computed) of each row, before its step

    def _store(self, step: FakeStep, layer: int) -> None:
        if layer < self.layout.num_target_layers:
            super()._store(step, layer)
        elif self.drafts:
            for row in step.rows:
                for position in range(row.sequence.num_draft_computed, len(row.token_ids)):
                    block, slot = self._slot(row, position)
                    self._kv[block, layer, :, slot] = row.token_ids[position], -position

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        self.counted += [(row.start, row.sequence.num_draft_computed) for row in step.rows]
        sampled = super()._compute(step)
        if self.drafts and self.draft_kv is not None:
            for row in step.rows:
                self.draft_kv.advance(row.sequence, len(row.token_ids))
        return sampled

    def drafted(self, table: list[int], num_tokens: int) -> list[list[tuple[int, int]]]:
        """(K, V) of the leading tokens, in each draft layer."""
        places = [(table[i // self.layout.block_size], i % self.layout.block_size) for i in range(num_tokens)]
        layers = range(NUM_LAYERS, self.layout.num_layers)
        return [[tuple(self._kv[block, layer, :, slot].tolist()) for block, slot in places] for layer in layers]


def drafted_of(token_ids: list[int]) -> list[list[tuple[int, int]]]:
    """The (K, V) that `DraftRunner.drafted` finds where these tokens have the draft's KV."""
    return [[(token_id, -position) for position, token_id in enumerate(token_ids)]] * NUM_DRAFT_LAYERS


def make_drafting(runner: DraftRunner | None = None, layer_groups: int = 0, **config: int) -> Engine:
    runner = runner or DraftRunner()
    engine = Engine(runner, SchedulerConfig(**config), layer_groups=layer_groups, clock=Clock())
    runner.draft_kv = engine.draft_kv
    return engine


def runner_of(engine: Engine) -> DraftRunner:
    runner = engine._runner  # pyright: ignore[reportPrivateUsage]
    assert isinstance(runner, DraftRunner)
    return runner
