"""Places that Ray has reserved: placement groups of one bundle for each process, kept under a name until they are given
back."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_placement_group

RESOURCE_DIGITS = 4  # that Ray counts amounts to


@dataclass(frozen=True, slots=True)
class Place:
    """Bundle of a placement group, all of whose bundles are alike: on one node, or each on a node of its own."""

    group: str  # the group's name
    bundle: dict[str, float]
    labels: dict[str, str]
    index: int = 0
    size: int = 1
    is_spread: bool = False

    @property
    def is_gang(self) -> bool:
        """Return whether its bundles are those of several workers."""
        return self.size > 1 and not self.is_spread

    @property
    def needs(self) -> str:
        """Text that says what the whole group needs."""
        on_each = 1 if self.is_spread else self.size
        amounts = [f"{name}: {each * on_each:g}" for name, each in self.bundle.items()]
        found = ", ".join(amounts + [f"{name}: {value}" for name, value in self.labels.items()])
        if self.is_spread:
            return f"{self.size} nodes, each with {found}"
        return f"a node with {found}" + (f" for a gang of {self.size} workers" if self.size > 1 else "")

    def take(self) -> PlacementGroup:
        """The group is made by the first one of it."""
        with suppress(ValueError):
            return get_placement_group(self.group)
        bundles, labels = [self.bundle] * self.size, [self.labels] * self.size
        together = "STRICT_SPREAD" if self.is_spread else "STRICT_PACK"
        strategy = "PACK" if self.size == 1 else together
        return placement_group(bundles, strategy, self.group, "detached", bundle_label_selector=labels)


def give_back(group: str) -> None:
    """Remove the group and kill what runs in it. Idempotent."""
    with suppress(ValueError):
        remove_placement_group(get_placement_group(group))


def bundle_of(num_cpus: float, num_gpus: float, resources: Mapping[str, float], num_parts: int = 1) -> dict[str, float]:
    """Return what one of so many equal parts takes."""
    wanted = {"CPU": num_cpus, "GPU": num_gpus, **resources}
    parts = {name: round(amount / num_parts, RESOURCE_DIGITS) for name, amount in wanted.items()}
    return {name: amount for name, amount in parts.items() if amount > 0}
