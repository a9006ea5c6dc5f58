"""Token counts of each expert of a mixture, over a cluster, as `expert_placement` reads them. Arithmetic and a file.

counts  = what each worker has counted, added up, by layer
save    = a JSON list, of each layer that has experts a list of counts, in order
balance = what the busiest rank would have to do, by what one has on average: of each way to place the experts
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...workers.common.errors import ConfigError, InternalError
from ...workers.kv.layout import LARGEST
from ...workers.models.plan.expert_placement import DEALT_OUT, IN_ORDER, Placement, by_load, contiguous, round_robin

if TYPE_CHECKING:
    from ...proto.worker_pb2 import LoadReport, WorkerState

Counts = dict[int, list[int]]  # by layer, of each expert
MAX_EXPERTS = 4096  # of a layer
MAX_LAYERS = LARGEST["num_layers"]


def check_counts(load: "LoadReport") -> None:
    """Raise InternalError for more counts than any model has experts or layers."""
    if len(load.expert_tokens) > MAX_EXPERTS or len(load.expert_imbalance) > MAX_LAYERS:
        raise InternalError(
            f"a load report counts {len(load.expert_tokens)} experts and {len(load.expert_imbalance)} layers: at most "
            f"{MAX_EXPERTS} and {MAX_LAYERS}"
        )


def add_up(states: "Iterable[WorkerState]") -> Counts:
    """Raises InternalError where workers count unlike layers."""
    found: Counts = {}
    for state in states:
        for layer in state.experts:
            before = found.get(layer.layer, [0] * len(layer.tokens))
            if len(before) != len(layer.tokens):
                raise InternalError(
                    f"workers count {len(before)} and {len(layer.tokens)} experts in layer {layer.layer}: they serve "
                    "different models. Start the cluster again with one checkpoint"
                )
            found[layer.layer] = [a + b for a, b in zip(before, layer.tokens, strict=True)]
    return dict(sorted(found.items()))


def save(counts: Mapping[int, Sequence[int]], path: Path) -> None:
    """Raises ConfigError."""
    try:
        path.write_text(json.dumps([list(own) for own in counts.values()]) + "\n")
    except OSError as e:
        raise ConfigError(f"{path} cannot be written ({e.strerror}): choose another file") from e


def imbalance(loads: Sequence[int]) -> float:
    """The busiest expert's by the average; 0 where nothing has gone to any."""
    return max(loads) * len(loads) / total if (total := sum(loads)) else 0.0


def balance(counts: Mapping[int, Sequence[int]], num_ranks: int, num_copies: int) -> dict[str, float]:
    """Return, for each placement, the busiest rank's work divided by the average rank's; layers weigh by their tokens.
    Ranks wait for each other in every layer: experts take so much longer than they need to. Raises ConfigError."""
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
