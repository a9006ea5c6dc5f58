"""Placement of experts on ranks. Arithmetic only, no torch.

From the config: in order, or dealt out like cards. From measured load: hot experts are held more than once, and each
copy goes to the rank that has least to do, the heaviest first (Graham 1969). Where several ranks hold an expert, they
take turns with the rows of a step that go to it: by a row's number, which all ranks know, and where ranks have rows of
their own by the rank's too. What is computed does not depend on where, so that turns are a matter of balance alone.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from ...common.errors import ConfigError
from ..families.spec import ModelSpec, MoeSpec

IN_ORDER = "contiguous"
DEALT_OUT = "round_robin"
MAX_FILE_BYTES = 1 << 24  # of loads: a hundred layers of a thousand experts are a tenth of it


@dataclass(frozen=True, slots=True)
class Placement:
    """held: of each rank its experts, ascending; an expert's index there is its slot."""

    num_experts: int
    held: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for rank, experts in enumerate(self.held):
            if list(experts) != sorted(set(experts)) or not set(experts) <= set(range(self.num_experts)):
                raise ConfigError(f"rank {rank} has the experts {experts}: name each once, in ascending order")
        if missing := set(range(self.num_experts)).difference(*self.held):
            raise ConfigError(f"no rank holds the experts {sorted(missing)}: place all {self.num_experts}")

    @classmethod
    def of(cls, held: Sequence[Sequence[int]]) -> "Placement":
        """held: of each rank, of a placement of all experts."""
        return cls(1 + max(max(experts) for experts in held), tuple(tuple(experts) for experts in held))

    @property
    def num_ranks(self) -> int:
        return len(self.held)

    def holders(self) -> list[list[int]]:
        """Ranks that hold each expert, ascending: they take turns with the rows of a step."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.held):
            for expert in experts:
                found[expert].append(rank)
        return found

    def slots(self, rank: int) -> list[int]:
        """Slot of each expert at `rank`; -1 where it is not there."""
        places = {expert: slot for slot, expert in enumerate(self.held[rank])}
        return [places.get(expert, -1) for expert in range(self.num_experts)]

    def load(self, loads: Sequence[float]) -> list[float]:
        """Return the load of each rank where expert i has loads[i], which its holders share evenly."""
        shares = [load / len(ranks) for load, ranks in zip(loads, self.holders(), strict=True)]
        return [sum(shares[expert] for expert in experts) for experts in self.held]


def contiguous(num_experts: int, num_ranks: int) -> Placement:
    """Rank 0 has the first ones. Where they do not divide, some ranks hold one more than others."""
    _check(num_experts, num_ranks)
    starts = [rank * num_experts // num_ranks for rank in range(num_ranks + 1)]
    return Placement(num_experts, tuple(tuple(range(a, b)) for a, b in pairwise(starts)))


def round_robin(num_experts: int, num_ranks: int) -> Placement:
    """Expert i at rank i modulo num_ranks."""
    _check(num_experts, num_ranks)
    return Placement(num_experts, tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks)))


def by_load(loads: Sequence[float], num_ranks: int, num_copies: int = 0) -> Placement:
    """loads: of each expert, tokens in some span of time. num_copies: held beside the first one of each expert, by the
    experts whose holders have most to do. No rank holds more than its even part of all, rounded up; a copy for which
    only ranks have room that have it already is left out."""
    num_experts = len(loads)
    _check(num_experts, num_ranks)
    if not all(math.isfinite(load) and load >= 0 for load in loads):
        raise ConfigError("an expert's load is a number of tokens: give a number of at least 0 for each expert")
    if not 0 <= num_copies <= num_experts * (num_ranks - 1):
        raise ConfigError(
            f"{num_copies} copies of {num_experts} experts do not fit on {num_ranks} ranks, because no rank holds an "
            f"expert twice: use at most {num_experts * (num_ranks - 1)}"
        )
    num_holders = _num_holders(loads, num_ranks, num_copies)
    most = math.ceil((num_experts + num_copies) / num_ranks)
    queue = sorted((-load / n, expert) for expert, (load, n) in enumerate(zip(loads, num_holders, strict=True)))
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    for share, expert in queue:
        for _ in range(num_holders[expert]):
            fitting = [rank for rank in range(num_ranks) if len(held[rank]) < most and expert not in held[rank]]
            if fitting:
                rank = min(fitting, key=lambda rank: (work[rank], len(held[rank])))
                held[rank].append(expert)
                work[rank] -= share
    return Placement(num_experts, tuple(tuple(sorted(experts)) for experts in held))


def _num_holders(loads: Sequence[float], num_ranks: int, num_copies: int) -> list[int]:
    """Each further copy is of the expert whose holders have most to do."""
    found = [1] * len(loads)
    for _ in range(num_copies):
        open_ones = [expert for expert, n in enumerate(found) if n < num_ranks]
        found[max(open_ones, key=lambda expert: (loads[expert] / found[expert], -found[expert]))] += 1
    return found


def _check(num_experts: int, num_ranks: int) -> None:
    if not 1 <= num_ranks <= num_experts:
        raise ConfigError(f"{num_experts} experts cannot be spread over {num_ranks} ranks: use 1 to {num_experts}")


def place_experts(
    spec: ModelSpec,
    num_ranks: int,
    placement: str = IN_ORDER,
    num_copies: int = 0,
    setting: str = "expert_parallel",
) -> dict[int, Placement]:
    """Placement by layer, of those with experts. placement: "contiguous", "round_robin", or a path of a file of loads.
    setting: which asks for so many ranks. Raises ConfigError."""
    sizes = {i: of.num_experts for i, layer in enumerate(spec.layers) if isinstance(of := layer.feed_forward, MoeSpec)}
    if not sizes:
        raise ConfigError(f"{setting}={num_ranks} needs a model with experts: leave it out")
    if placement in (IN_ORDER, DEALT_OUT):
        if num_copies:
            raise ConfigError(f"expert_copies={num_copies} needs measured loads: set expert_placement to a file")
        place = contiguous if placement == IN_ORDER else round_robin
        return {layer: place(num_experts, num_ranks) for layer, num_experts in sizes.items()}
    loads = read_loads(Path(placement), list(sizes.values()))
    return {layer: by_load(own, num_ranks, num_copies) for layer, own in zip(sizes, loads, strict=True)}


def read_loads(path: Path, sizes: Sequence[int]) -> list[list[float]]:
    """A JSON list with a list for each layer that has experts, of a number for each of them. sizes: how many those are.
    Raises ConfigError."""
    remedy = f"expert_placement must be {IN_ORDER}, {DEALT_OUT} or a JSON file of loads"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES:,} bytes: {remedy}")
        found: Any = json.loads(path.read_bytes())
    except OSError as e:
        raise ConfigError(f"{path} cannot be read ({e.strerror}): {remedy}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not valid JSON ({e}): {remedy}") from e
    layers = cast("list[Any]", found) if isinstance(found, list) else []
    lengths = [len(cast("list[Any]", own)) if isinstance(own, list) else -1 for own in layers]
    if lengths != list(sizes):
        raise ConfigError(f"{path} must be a list of {len(sizes)} lists, each with one load per expert of its layer")
    if not all(isinstance(load, (int, float)) and not isinstance(load, bool) for own in layers for load in own):
        raise ConfigError(f"{path} must contain only numbers: for each expert, the number of tokens routed to it")
    return layers
