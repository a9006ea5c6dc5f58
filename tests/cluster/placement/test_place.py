"""Messages about workers for which Ray has no room."""

from diptych.cluster.placement.place import Place, bundle_of


def test_a_gang_needs_its_node_as_a_whole() -> None:
    bundle = bundle_of(4, 0, {"fast_disk": 0.5})
    assert bundle == {"CPU": 4, "fast_disk": 0.5}
    labels = {"zone": "a"}
    assert Place("decode-1", bundle, labels).needs == "CPU: 4, fast_disk: 0.5, zone: a"
    gang = Place("decode-1", bundle, labels, index=1, size=2)
    assert gang.needs == "CPU: 8, fast_disk: 1, zone: a for a gang of 2 workers"
