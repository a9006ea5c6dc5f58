"""Places that Ray has reserved: placement groups of one bundle for each process, kept under a name until they are given
back."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_placement_group


@dataclass(frozen=True, slots=True)
class Place:
    """Bundle of a placement group, all of whose bundles are alike and on one node."""

    group: str  # the group's name
    bundle: dict[str, float]
    labels: dict[str, str]
    index: int = 0
    size: int = 1

    @property
    def needs(self) -> str:
        """Text that says what the whole group needs of its node."""
        amounts = [f"{name}: {each * self.size:g}" for name, each in self.bundle.items()]
        found = ", ".join(amounts + [f"{name}: {value}" for name, value in self.labels.items()])
        return found if self.size == 1 else f"{found} for a gang of {self.size} workers"

    def take(self) -> PlacementGroup:
        """The group is made by the first one of it."""
        with suppress(ValueError):
            return get_placement_group(self.group)
        bundles, labels = [self.bundle] * self.size, [self.labels] * self.size
        strategy = "PACK" if self.size == 1 else "STRICT_PACK"
        return placement_group(bundles, strategy, self.group, "detached", bundle_label_selector=labels)


def give_back(group: str) -> None:
    """Remove the group and kill what runs in it. Idempotent."""
    with suppress(ValueError):
        remove_placement_group(get_placement_group(group))


def bundle_of(num_cpus: float, num_gpus: float, resources: Mapping[str, float]) -> dict[str, float]:
    wanted = {"CPU": num_cpus, "GPU": num_gpus, **resources}
    return {name: amount for name, amount in wanted.items() if amount > 0}
