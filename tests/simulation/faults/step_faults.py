"""Steps that raise: because of one request, at random, or because a worker can no longer compute."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from diptych.workers.testing.fake_stream import FakeRow, FakeStep

from ..checks.violation import demand

if TYPE_CHECKING:
    from ..world import World

SELF_TEST = "self-test"


class StepFault(RuntimeError):
    """Error of a runner, from the engine's point of view."""


class StepFaults:
    """`poisonous`: requests whose token at that position of the output cannot be computed, anywhere."""

    def __init__(self, world: "World", rate: float) -> None:
        self._world, self._rate = world, rate
        self.poisonous = {c.request.request_id: c.poison_at for c in world.clients if c.poison_at is not None}
        # By request: steps that raised with it, or that could not be told from one: the engine ends those of both steps
        # where one raises while the next is launched.
        self.raised: Counter[str] = Counter()
        self.raised_alone: Counter[str] = Counter()
        self.caused: Counter[str] = Counter()  # by poisonous request
        self._broken: set[str] = set()  # incarnations
        self._struck: list[str] = []  # requests of the last step that raised

    def strike(self, host: str, incarnation: str, step: FakeStep) -> None:
        """Fail a step, on the engine's thread. Raises StepFault."""
        world = self._world
        ids = _requests(step)
        guilty = {row.sequence.request.request_id for row in step.rows if self._is_poison(row)}
        by_chance = world.rng.random() < self._rate and SELF_TEST not in ids
        if by_chance and world.rng.random() < 0.1:
            self._broken.add(incarnation)
        if not (guilty or by_chance or incarnation in self._broken):
            return
        self._struck = ids
        self.raised.update(ids)
        if len(ids) == 1:
            self.raised_alone.update(ids)
        self.caused.update(guilty)
        now = world.clock.now
        world.network.troubles.add(now, now, host)
        world.note(f"a step of {host} raises: {' '.join(ids)}")
        raise StepFault("it cannot be computed")

    def launch_failed(self, steps: Sequence[FakeStep]) -> None:
        """Note the requests of the steps that were under way when one of them, the last that was struck, raised."""
        own = dict.fromkeys(each for step in steps for each in _requests(step))
        self.raised.update(each for each in own if each not in self._struck)

    def _is_poison(self, row: FakeRow) -> bool:
        sequence = row.sequence
        at = self.poisonous.get(sequence.request.request_id)
        return at is not None and row.samples and len(row.token_ids) - sequence.num_prompt == at

    def check_blamed(self, request_id: str) -> None:
        """Check that the request caused at least two failures, one of them alone in its step."""
        is_due = self.raised[request_id] >= 2 and self.raised_alone[request_id]
        demand(is_due, f"{request_id} is blamed for {self.raised[request_id]} steps")

    def check(self, request_id: str) -> None:
        """A poisonous request costs its neighbours one step, and itself another. An attempt of two workers may have two
        failed steps."""
        state = self._world.states[request_id]
        others = max(state.num_attempts - len(state.failures.steps), 0)
        most = 2 + others
        demand(self.caused[request_id] <= most, f"{request_id} made {self.caused[request_id]} steps fail")


def _requests(step: FakeStep) -> list[str]:
    """Return each once: a sequence whose draft is verified has several rows."""
    return list(dict.fromkeys(row.sequence.request.request_id for row in step.rows))
