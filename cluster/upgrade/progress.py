"""Progress of an upgrade of a cluster's workers. Pure data, kept as JSON for the supervisor that may follow this one.

    running ──every worker has the new settings──> done
       └──a worker with them fails──> rolling back ──every worker has the old settings──> rolled back

Settings are numbered: each upgrade makes a generation of workers. One that fails as its settings are the same way again
ends the upgrade at once, one that is lost (a machine may have died) the second time. On the way back all is tried until
it is there; another upgrade may take the place of one that does not come back.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from ...workers.common.errors import DiptychError
from ..common.config import ClusterConfig

MAX_LOSSES = 2
NOTHING: Mapping[str, int] = MappingProxyType({})


class UpgradePhase(StrEnum):
    RUNNING = "running"
    ROLLING_BACK = "rolling back"
    DONE = "done"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """The last upgrade. `wanted`: generation that all workers shall have; `other`: the one that they had, or, when it
    rolls back, that failed."""

    wanted: int
    other: int
    phase: UpgradePhase = UpgradePhase.RUNNING
    in_place: bool = False  # a worker ends before the one that replaces it starts
    num_losses: int = 0  # of workers of the new generation
    reason: str = ""  # why it is rolled back
    setback: str = ""  # why the last worker did not come back
    lacked: Mapping[str, int] = field(default_factory=dict[str, int])  # by pool: workers that had no place before
    tried: tuple[str, ...] = ()  # incarnations of the workers that may serve; all others are put to a trial before

    @property
    def number(self) -> int:
        """Generation that it has made."""
        return max(self.wanted, self.other)

    @property
    def is_over(self) -> bool:
        return self.phase in (UpgradePhase.DONE, UpgradePhase.ROLLED_BACK)

    def failed(self, who: str, error: DiptychError, lacked: Mapping[str, int] = NOTHING) -> "Upgrade":
        """Return what follows where a worker of the wanted generation fails. `who`: its name; `lacked`: workers of each
        pool that have no place."""
        if self.is_over:
            return self
        if self.phase is UpgradePhase.ROLLING_BACK:
            return replace(self, setback=f"{who}: {error.message}")
        num_losses = self.num_losses + 1
        if error.retryable and num_losses < MAX_LOSSES:
            return replace(self, num_losses=num_losses)
        return replace(
            self,
            wanted=self.other,
            other=self.wanted,
            phase=UpgradePhase.ROLLING_BACK,
            num_losses=num_losses,
            lacked={pool: max(self.lacked.get(pool, 0), lacked.get(pool, 0)) for pool in {*self.lacked, *lacked}},
            reason=f"{who}: {error.message}",
        )

    def passed(self, incarnation: str) -> "Upgrade":
        """Return what follows where a worker may serve."""
        return self if incarnation in self.tried else replace(self, tried=(*self.tried, incarnation))

    def finished(self) -> "Upgrade":
        """Return what follows where every worker has the wanted settings."""
        ends = {UpgradePhase.RUNNING: UpgradePhase.DONE, UpgradePhase.ROLLING_BACK: UpgradePhase.ROLLED_BACK}
        return replace(self, phase=ends.get(self.phase, self.phase), setback="")


@dataclass(frozen=True, slots=True)
class UpgradeStatus:
    """Upgrade as a person sees it."""

    phase: str
    generation: int  # that all workers shall have
    num_done: int  # workers that serve with it
    num_left: int  # workers of the other
    reason: str = ""
    setback: str = ""
    number: int = 0  # of the upgrade: generation that it has made


def to_json(generations: Mapping[int, ClusterConfig], upgrade: Upgrade) -> str:
    """Return it as text. The settings have clients' keys in them, as the deployment that Ray keeps has."""
    settings = {str(number): config.model_dump_json(exclude_unset=True) for number, config in generations.items()}
    return json.dumps({"generations": settings, "upgrade": asdict(upgrade)})


def from_json(text: str) -> tuple[dict[int, ClusterConfig], Upgrade]:
    """Read what `to_json` wrote."""
    kept = json.loads(text)
    generations = {
        int(number): ClusterConfig.model_validate_json(config) for number, config in kept["generations"].items()
    }
    fields = kept["upgrade"]
    tried = tuple(fields.get("tried", ()))  # an earlier version did not note it
    return generations, Upgrade(**fields | {"phase": UpgradePhase(fields["phase"]), "tried": tried})
