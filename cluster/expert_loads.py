"""What has gone to each expert of a mixture, over a cluster: what `expert_placement` reads. Arithmetic and a file.

counts  = what each worker has counted, added up, by layer
save    = a JSON list, of each layer that has experts a list of counts, in order
balance = what the busiest rank would have to do, by what one has on average: of each way to place the experts
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..workers.errors import ConfigError
from ..workers.models.expert_placement import DEALT_OUT, IN_ORDER, Placement, by_load, contiguous, round_robin

if TYPE_CHECKING:
    from ..proto.worker_pb2 import WorkerState

Counts = dict[int, list[int]]  # by layer, of each expert


def add_up(states: "Iterable[WorkerState]") -> Counts:
    found: Counts = {}
    for state in states:
        for layer in state.experts:
            before = found.get(layer.layer, [0] * len(layer.tokens))
            found[layer.layer] = [a + b for a, b in zip(before, layer.tokens, strict=True)]
    return dict(sorted(found.items()))


def save(counts: Mapping[int, Sequence[int]], path: Path) -> None:
    """Raises ConfigError."""
    try:
        path.write_text(json.dumps([list(own) for own in counts.values()]) + "\n")
    except OSError as e:
        raise ConfigError(f"{path} cannot be written ({e.strerror}): name another file") from e


def imbalance(loads: Sequence[int]) -> float:
    """The busiest expert's by the average; 0 where nothing has gone to any."""
    return max(loads) * len(loads) / total if (total := sum(loads)) else 0.0


def balance(counts: Mapping[int, Sequence[int]], num_ranks: int, num_copies: int) -> dict[str, float]:
    """By placement: the busiest rank's work by the average rank's, each layer's in proportion to its tokens. Ranks wait
    for each other in every layer: experts take so much longer than they need to. Raises ConfigError."""
    busiest = dict.fromkeys((IN_ORDER, DEALT_OUT, "by load"), 0.0)
    for loads in counts.values():
        placements: tuple[Placement, ...] = (
            contiguous(len(loads), num_ranks),
            round_robin(len(loads), num_ranks),
            by_load(loads, num_ranks, num_copies),
        )
        for name, placement in zip(busiest, placements, strict=True):
            busiest[name] += max(placement.load(loads))
    total = sum(map(sum, counts.values()))
    return {name: most * num_ranks / total if total else 0.0 for name, most in busiest.items()}
