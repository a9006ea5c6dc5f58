"""Layouts of a cluster on a number of GPUs of one kind, and the settings of each. Pure.

number of GPUs ─> ranks of a worker that the model allows and whose memory suffices
               ─> pools: mixed × n; prefill × p + decode × d, each with its ranks
               ─> routes: by roles, by predicted times, by predicted times with the dial
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import product
from typing import Any

from ...workers.common.errors import ConfigError
from ...workers.models.families.spec import ModelSpec, MoeSpec
from ...workers.models.plan.kept_numbers import Layouts
from ..common.config import POOL_NAMES
from ..preflight.memory_plan import Memory, MemoryPlan, Parallelism, plan_memory
from ..simulate.gpus import Gpu

DTYPE = "bfloat16"  # the rate at which the simulator's GPUs compute
MOST_GPUS = 1024
ROOM_SHARE = 0.8  # of the planned KV room, for the longest sequence
MOST_RANKS = 8  # of a worker: the GPUs of one machine
MOST_SPLITS = 7  # of the GPUs between prefill and decode, for each pair of ranks
REQUESTS_OF_WORKER = 1024  # in flight at the router, for each worker


class LayoutKind(Enum):
    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"


class Routes(Enum):
    """Ways to choose workers. DIAL: by predicted times, while the controller moves prefill budgets."""

    ROLES = "roles"
    PREDICTED = "predicted"
    DIAL = "dial"


Group = tuple[LayoutKind, Routes]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of a worker, a GPU each. `kv_tokens`: whose KV a worker holds."""

    tensor_parallel: int
    expert_parallel: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """A pool of a layout. `name`: as in the cluster's settings."""

    name: str
    num_workers: int
    ranks: Ranks

    @property
    def num_gpus(self) -> int:
        return self.num_workers * self.ranks.tensor_parallel


@dataclass(frozen=True, slots=True)
class Layout:
    """Pools and routes of a cluster."""

    pools: tuple[PlannedPool, ...]
    routes: Routes

    @property
    def kind(self) -> LayoutKind:
        return LayoutKind.COLOCATED if self.pools[0].name == "mixed" else LayoutKind.DISAGGREGATED

    @property
    def group(self) -> Group:
        """Layouts that are compared with each other."""
        return self.kind, self.routes

    @property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def pools_text(self) -> str:
        """Its pools, as `2 prefill + 6 decode`."""
        return " + ".join(f"{pool.num_workers} {pool.name}" for pool in self.pools)

    @property
    def ranks_text(self) -> str:
        """GPUs of a worker of each pool: `2`, or `4 + 2` where they differ; with `e` where ranks have whole experts."""
        texts = [f"{p.ranks.tensor_parallel}{'e' if p.ranks.expert_parallel > 1 else ''}" for p in self.pools]
        return texts[0] if len(set(texts)) == 1 else " + ".join(texts)

    def __str__(self) -> str:
        return f"{self.pools_text}, TP {self.ranks_text}, {self.routes.value}"


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory of each worker's GPUs. `kv_fraction`: of what the weights leave; `needed_tokens`: whose KV a worker must
    hold to be of use; `max_context_tokens`: longest sequence that is served, where workers have room for it;
    `quantize`, `kv_dtype`: as the settings; `layouts`: of weights that stay as the checkpoint has them."""

    gpu: Gpu
    kv_fraction: float
    needed_tokens: int
    max_context_tokens: int
    block_size: int = 16
    quantize: str | None = None
    kv_dtype: str = "auto"
    layouts: Layouts = field(default_factory=dict[str, Any])

    def plan(self, spec: ModelSpec, tensor_parallel: int) -> tuple[Parallelism, MemoryPlan]:
        """Memory of a worker's ranks. Raises ConfigError where they cannot share the model."""
        has = Memory(int(self.gpu.memory_bytes), self.kv_fraction)
        how = Parallelism(DTYPE, self.quantize, tensor_parallel, self.block_size, on_gpus=True, kv_dtype=self.kv_dtype)
        try:
            return how, plan_memory(spec, how, has, self.max_context_tokens, layouts=self.layouts)
        except ConfigError:
            if tensor_parallel == 1 or not any(isinstance(layer.feed_forward, MoeSpec) for layer in spec.layers):
                raise
        # Experts that cannot be sliced are shared whole.
        whole = replace(how, expert_parallel=tensor_parallel)
        return whole, plan_memory(spec, whole, has, self.max_context_tokens, layouts=self.layouts)


def ranks_that_fit(spec: ModelSpec, memory: WorkerMemory, num_gpus: int) -> list[Ranks]:
    """Numbers of ranks with which a worker holds the model and enough KV. Raises ConfigError where none does."""
    found: list[Ranks] = []
    reasons: list[str] = []
    ranks = 1
    while ranks <= min(num_gpus, MOST_RANKS):
        try:
            how, plan = memory.plan(spec, ranks)
        except ConfigError as e:
            reasons.append(f"{ranks}: {e.message}")
        else:
            if plan.first.free_bytes > 0 and plan.num_tokens >= memory.needed_tokens:
                found.append(Ranks(ranks, how.expert_parallel, plan.num_tokens))
            else:
                reasons.append(f"{ranks}: {_shortage(plan, memory)}")
        ranks *= 2
    if not found:
        raise ConfigError(
            "no layout fits, by the number of GPUs of a worker: "
            + "; ".join(reasons)
            + ". Give more GPUs, or GPUs with more memory (--gpus), or a smaller model"
        )
    return found


def _shortage(plan: MemoryPlan, memory: WorkerMemory) -> str:
    weights = plan.first.weight_bytes
    if plan.first.free_bytes <= 0:
        return f"the weights take {weights:,} bytes on each, but a GPU has {int(memory.gpu.memory_bytes):,}"
    missing = plan.token_bytes * memory.needed_tokens
    return (
        f"beside weights of {weights:,} bytes KV of {plan.num_tokens:,} tokens fits on a GPU of "
        f"{int(memory.gpu.memory_bytes):,}, but the load needs {memory.needed_tokens:,} tokens ({missing:,} bytes)"
    )


def layouts_of(num_gpus: int, ranks: Sequence[Ranks]) -> list[Layout]:
    """Layouts that take exactly `num_gpus`."""
    pools = [*_colocated(num_gpus, ranks), *_disaggregated(num_gpus, ranks)]
    return [Layout(each, routes) for each in pools for routes in Routes if routes != Routes.DIAL or _is_even(each)]


def _is_even(pools: tuple[PlannedPool, ...]) -> bool:
    """Return whether all workers are alike, so that the dial can move budgets between them."""
    return sum(pool.num_workers for pool in pools) > 1 and len({pool.ranks for pool in pools}) == 1


def _colocated(num_gpus: int, ranks: Sequence[Ranks]) -> Iterator[tuple[PlannedPool, ...]]:
    for each in ranks:
        if num_gpus % each.tensor_parallel == 0:
            yield (PlannedPool("mixed", num_gpus // each.tensor_parallel, each),)


def _disaggregated(num_gpus: int, ranks: Sequence[Ranks]) -> Iterator[tuple[PlannedPool, ...]]:
    for of_prefill, of_decode in product(ranks, repeat=2):
        splits = [
            (num, rest // of_decode.tensor_parallel)
            for num in range(1, num_gpus // of_prefill.tensor_parallel + 1)
            if (rest := num_gpus - num * of_prefill.tensor_parallel) > 0 and rest % of_decode.tensor_parallel == 0
        ]
        for num_prefill, num_decode in _spread(splits, MOST_SPLITS):
            yield PlannedPool("prefill", num_prefill, of_prefill), PlannedPool("decode", num_decode, of_decode)


def _spread(splits: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Return at most `most` of the splits, evenly spaced, the first and the last among them."""
    if len(splits) <= most:
        return list(splits)
    step = (len(splits) - 1) / (most - 1)
    return [splits[round(i * step)] for i in range(most)]


def beside(layout: Layout, layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layouts that differ by the next smaller or larger number of prefill workers alone."""
    ranks = [pool.ranks for pool in layout.pools]
    line = [each for each in layouts if each.group == layout.group and [pool.ranks for pool in each.pools] == ranks]
    line.sort(key=lambda each: each.pools[0].num_workers)
    place = line.index(layout)
    return line[max(place - 1, 0) : place] + line[place + 1 : place + 2]


@dataclass(frozen=True, slots=True)
class PlannedLevel:
    """Service level in seconds, and the share of the requests that must meet it."""

    ttft_s: float
    tpot_s: float
    share: float = 0.9

    def __str__(self) -> str:
        return f"TTFT <= {self.ttft_s * 1000:g} ms and TPOT <= {self.tpot_s * 1000:g} ms for {self.share * 100:g} %"


def settings_of(layout: Layout, model: str, memory: WorkerMemory, level: PlannedLevel) -> dict[str, Any]:
    """The cluster's settings, as in cluster.yaml. All three pools are named: pools of equal settings may exchange
    workers, and the dial moves budgets between those."""
    sizes = {pool.name: pool for pool in layout.pools}
    is_dial = layout.routes == Routes.DIAL
    names = [name for name in POOL_NAMES if name in sizes or is_dial]
    return {
        "model": model,
        "device": "cuda",
        "dtype": DTYPE,
        "quantize": memory.quantize,
        "kv_dtype": memory.kv_dtype,
        "block_size": memory.block_size,
        "max_context_tokens": _context(layout, memory),
        "dial": is_dial,
        "pools": {name: _pool(sizes.get(name), layout.pools[0].ranks, memory) for name in names},
        "router": {
            "predict": layout.routes != Routes.ROLES,
            "max_requests": REQUESTS_OF_WORKER * sum(pool.num_workers for pool in layout.pools),
        },
        "service_level": {"ttft_s": level.ttft_s, "tpot_s": level.tpot_s},
    }


def _context(layout: Layout, memory: WorkerMemory) -> int:
    """Longest sequence to serve. A worker that has no room for one does not start, and what else takes memory of a GPU
    is not known here."""
    room = int(ROOM_SHARE * min(pool.ranks.kv_tokens for pool in layout.pools))
    return min(max(room, memory.needed_tokens), memory.max_context_tokens)


def _pool(pool: PlannedPool | None, others: Ranks, memory: WorkerMemory) -> Mapping[str, Any]:
    ranks = pool.ranks if pool else others
    return {
        "replicas": pool.num_workers if pool else 0,
        "tensor_parallel": ranks.tensor_parallel,
        "expert_parallel": ranks.expert_parallel,
        "kv_memory_fraction": memory.kv_fraction,
    }
