"""The simulation finds bugs: each of mutations.py, bridge_mutations.py and mutations_ahead.py, in NUM_SEEDS seeds."""

from collections.abc import Callable

import pytest

from .bridge_mutations import BRIDGE_MUTATIONS
from .mutations import MUTATIONS, Replacement, planted
from .mutations_ahead import AHEAD
from .world import simulate

NUM_SEEDS = 600


@pytest.mark.parametrize("mutation", MUTATIONS + BRIDGE_MUTATIONS + AHEAD, ids=lambda mutation: mutation.__name__)
def test_a_planted_bug_is_found(mutation: Callable[[], list[Replacement]]) -> None:
    with planted(mutation()):
        for seed in range(NUM_SEEDS):
            try:
                simulate(seed)
            except Exception:
                return
    raise AssertionError(f"{NUM_SEEDS} seeds did not find it")
