"""The hand-off's machines against a bad network, deaths and stalls; thousands of seeded runs. See handoff_world.py."""

from collections import Counter
from collections.abc import Callable

import pytest

from diptych.workers.handoff import SinkHandoff, SinkState, SourceHandoff
from diptych.workers.handoff_types import Answer, Commit, Fail, SinkAction, SourceAction

from .handoff_world import FOG, STORM, Weather, simulate

NUM_STORMS = 2000
KINDS = ("commit", "takeover", "quarantine", "LeaseLost", "WorkerLost", "TransportError", "OutOfBlocks", "HandoffError")


def test_on_a_kind_day_the_first_sink_commits() -> None:
    for seed in range(300):
        world = simulate(seed, Weather())
        assert world.commits == ["sink-0"], seed


def test_in_a_storm_nothing_wrong_is_committed_and_nothing_leaks() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(NUM_STORMS):
        outcomes += simulate(seed, STORM).outcomes + simulate(seed, FOG).outcomes
    assert all(outcomes[kind] > 20 for kind in KINDS), outcomes  # else the storm tests less than it says


@pytest.mark.parametrize("victim", ["source", "sink"])
@pytest.mark.parametrize("weather", [Weather(), STORM], ids=["kind", "storm"])
def test_a_death_at_every_step(victim: str, weather: Weather) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(15):
        for step in range(simulate(seed, weather).num_steps):
            outcomes += simulate(seed, weather, kill=victim, kill_at_step=step).outcomes
    assert outcomes["commit"] > 0
    assert outcomes["WorkerLost" if victim == "source" else "takeover"] > 0


def release_always(self: SourceHandoff, sink: str, now: float) -> list[SourceAction]:
    return [Answer(True)]


def release_late(self: SourceHandoff, sink: str, now: float) -> list[SourceAction]:
    """Forgets that the lease lapsed meanwhile: frees the blocks, and says that they are held."""
    return [*self.tick(now), Answer(True)]


def commit_unasked(self: SinkHandoff, now: float) -> list[SinkAction]:
    seal = self._seal  # pyright: ignore[reportPrivateUsage]
    if self.state is not SinkState.PULLING or seal is None or self._reading or self._table is None:  # pyright: ignore[reportPrivateUsage]
        return []
    self.state = SinkState.COMMITTED
    return [Commit(seal.num_computed, seal.output_token_ids)]


def fail_without_quarantine(self: SinkHandoff, error: Exception, now: float) -> list[SinkAction]:
    if self.is_over:
        return []
    self.state = SinkState.FAILED
    return [Fail(error, quarantine=False)]  # type: ignore[arg-type]


def never_tick(self: SourceHandoff | SinkHandoff, now: float) -> list[object]:
    return []


@pytest.mark.parametrize(
    ("machine", "method", "fault"),
    [
        (SourceHandoff, "release", release_always),
        (SourceHandoff, "release", release_late),
        (SinkHandoff, "_say_when_read", commit_unasked),
        (SinkHandoff, "failed", fail_without_quarantine),
        (SourceHandoff, "tick", never_tick),
        (SinkHandoff, "tick", never_tick),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_simulation_finds_faults(
    machine: type, method: str, fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, method, fault)
    with pytest.raises(AssertionError):
        for seed in range(NUM_STORMS):
            simulate(seed, STORM)
            simulate(seed, FOG)
