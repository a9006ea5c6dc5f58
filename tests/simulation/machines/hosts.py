"""Hosts of the workers of a world: memory layout, settings and speed of each."""

import random
from dataclasses import dataclass

from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.costs.step_cost import StepCost, StepWork
from diptych.workers.kv.layout import KVLayout

from .memory import CheckedRunner, layer_sizes, plan_layout, vary

NUM_TOKENS = (72, 120)  # that a worker's KV memory holds
NUM_MOULDS = 3


@dataclass(frozen=True)
class Host:
    name: str
    layout: KVLayout
    num_blocks: int
    step_s: float  # in the mean
    config: WorkerConfig

    def make_runner(self, haste: random.Random | None) -> CheckedRunner:
        return CheckedRunner(self.layout, self.num_blocks, haste)

    def teach(self, cost: StepCost, step_s: float) -> None:
        """Measure steps of a length: within a step no virtual time passes, so the engine measures none."""
        for num in range(12):
            cost.add(StepWork(num % 4, 9 * num).with_chunk(num, num % 3 * 4), step_s * (1 + num % 4 + num % 3))


class Hosts:
    """Common settings of all hosts of a world, and a factory of further ones. `moulds`: layouts that are drawn in
    advance, for worlds in which hosts appear later."""

    def __init__(self, rng: random.Random, lease_s: float, *, has_moulds: bool = False) -> None:
        self._lease_s = lease_s
        self._transports = rng.choice((("nixl", "grpc"), ("nixl", "grpc"), ("grpc",)))
        self._layout = plan_layout(rng)
        self._usual, self._are_alike = vary(rng, self._layout), rng.random() < 0.4
        self._moulds = [vary(rng, self._layout) for _ in range(NUM_MOULDS)] if has_moulds else []
        self._layouts = [self._usual, *self._moulds] if has_moulds or self._are_alike else []

    @property
    def largest_layer(self) -> int:
        """Bytes, in a block of a rank."""
        return max(max(layer_sizes(layout)) for layout in self._layouts)

    def make(self, rng: random.Random, name: str, pool: str) -> Host:
        step_s = 10 ** rng.uniform(-3, -1.2)
        own = self._usual if self._are_alike else self._vary(rng)
        num_blocks = own.num_blocks_for(rng.randint(*NUM_TOKENS)) + (own.block_size > 4)
        verifies = rng.random() < 0.3
        config = WorkerConfig.of(
            model="fake",
            role=pool,
            chunk_tokens=rng.choice((4, 6, 12, 0)),
            max_batch_tokens=rng.choice((8, 16, 64)),
            prefix_cache=rng.random() < 0.85,
            transports=self._transports,
            lease_s=self._lease_s,
            layer_groups=rng.choice((0, 1, 2, 3)),
            verify_kv=verifies,
            wire_dtype="bfloat16" if rng.random() < 0.1 else None,
        )
        return Host(name, own, num_blocks, step_s, config)

    def _vary(self, rng: random.Random) -> KVLayout:
        if self._moulds:
            return rng.choice(self._moulds)
        self._layouts.append(vary(rng, self._layout))
        return self._layouts[-1]
