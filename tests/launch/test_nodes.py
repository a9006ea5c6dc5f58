"""A cluster on five machines, each with a network of its own: KV goes between them, and one that dies, or that is cut
off, fails no request."""

from collections.abc import Iterator

import pytest

from ..support.cluster_harness import wait_until
from ..support.machines import lan
from ..support.ray_site import START_S, RaySite

pytestmark = [pytest.mark.e2e, pytest.mark.launch]

HEAD = "192.168.1.10"
ADDRESSES = {
    "prefill-1": "192.168.1.11",
    "prefill-2": "192.168.1.12",
    "decode-1": "192.168.1.13",
    "decode-2": "192.168.1.14",
}
CONFIG = """
model: tiny
pools:
  prefill: {replicas: 2, num_cpus: 1, threads: 1, kv_memory_bytes: 64MiB, label_selector: {diptych.io/pool: prefill}}
  decode: {replicas: 2, num_cpus: 1, threads: 1, kv_memory_bytes: 64MiB, label_selector: {diptych.io/pool: decode}}
router: {host: 0.0.0.0, http_port: 8000, grpc_port: 50051, label_selector: {diptych.io/pool: head}}
"""
MANY = 40  # requests: more than any worker holds


@pytest.fixture
def site() -> Iterator[RaySite]:
    """Machines on which Ray runs, labelled by their pools."""
    with lan("diptych") as found:
        site = RaySite.on(found, HEAD)
        site.start_ray(site.head)
        for name, ip in ADDRESSES.items():
            site.start_ray(found.add(name, ip))
        yield site


def test_no_request_fails_where_a_machine_dies_or_is_cut_off(site: RaySite) -> None:
    prefill_1, prefill_2, decode_1, decode_2 = ADDRESSES.values()
    with site.serving(CONFIG):
        assert site.workers() == {"prefill": [prefill_1, prefill_2], "decode": [decode_1, decode_2]}
        with site.load() as requests:
            requests.until_done(MANY)
            links = [link for link in site.status()["links"] if link["num_bytes"]]
            assert links and {link["transport"] for link in links} == {"grpc"}
            site.lan.named("decode-1").kill()
            requests.until_done(MANY)
            site.lan.cut(site.lan.named("prefill-2"))
            requests.until_done(MANY)
            wait_until(lambda: site.workers() == {"prefill": [prefill_1] * 2, "decode": [decode_2] * 2}, START_S)
            requests.until_done(MANY)
