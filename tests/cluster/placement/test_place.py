"""Placement groups, and messages about workers for which Ray has no room."""

import pytest

from diptych.cluster.placement import place
from diptych.cluster.placement.place import Place, bundle_of


def test_a_gang_needs_its_node_as_a_whole() -> None:
    bundle = bundle_of(4, 0, {"fast_disk": 0.5})
    assert bundle == {"CPU": 4, "fast_disk": 0.5}
    labels = {"zone": "a"}
    alone = Place("decode-1", bundle, labels)
    assert alone.needs == "a node with CPU: 4, fast_disk: 0.5, zone: a" and not alone.is_gang
    gang = Place("decode-1", bundle, labels, index=1, size=2)
    assert gang.needs == "a node with CPU: 8, fast_disk: 1, zone: a for a gang of 2 workers" and gang.is_gang


def test_a_worker_on_several_machines_needs_an_equal_part_on_each() -> None:
    bundle = bundle_of(4, 16, {"fast_disk": 1}, 3)
    assert bundle == {"CPU": 1.3333, "GPU": 5.3333, "fast_disk": 0.3333}, "as many digits as Ray counts"
    spread = Place("decode-1", bundle_of(4, 16, {}, 2), {"zone": "a"}, size=2, is_spread=True)
    assert spread.needs == "2 nodes, each with CPU: 2, GPU: 8, zone: a" and not spread.is_gang


@pytest.mark.parametrize(
    ("size", "is_spread", "strategy"), [(1, False, "PACK"), (2, False, "STRICT_PACK"), (2, True, "STRICT_SPREAD")]
)
def test_a_group_is_made_once(monkeypatch: pytest.MonkeyPatch, size: int, is_spread: bool, strategy: str) -> None:
    made: dict[str, tuple[object, ...]] = {}

    def make(bundles: object, strategy: str, name: str, lifetime: str, bundle_label_selector: object) -> object:
        made[name] = bundles, strategy, lifetime, bundle_label_selector
        return name

    def find(name: str) -> object:
        if name not in made:
            raise ValueError(name)
        return name

    monkeypatch.setattr(place, "placement_group", make)
    monkeypatch.setattr(place, "get_placement_group", find)
    assert Place("decode-1", {"CPU": 2}, {"zone": "a"}, 0, size, is_spread).take() == "decode-1"
    assert made == {"decode-1": ([{"CPU": 2}] * size, strategy, "detached", [{"zone": "a"}] * size)}
    assert Place("decode-1", {"CPU": 9}, {}).take() == "decode-1" and len(made) == 1
