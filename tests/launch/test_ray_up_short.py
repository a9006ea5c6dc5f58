"""deploy/ray/cluster.yaml in the gate: `ray up` of a head alone, on which Ray and torch are installed before, `diptych
serve`, a request, and `ray down`. test_ray_up.py does all that the page says, with the other machines."""

import sys
import time

import pytest

from ..support.cluster_harness import wait_until
from ..support.machines import lan
from ..support.ray_up import README, START_S, USER, Site, for_one_machine, give_all, served, shell_of, with_key

pytestmark = [pytest.mark.e2e, pytest.mark.launch, pytest.mark.cluster]


def test_ray_up_serves_and_ray_down_leaves_nothing() -> None:
    make_token, up, serve = shell_of(README)[:3]
    with lan(USER) as found:
        site = Site.on(found)
        give_all(site.head)
        for_one_machine(site)
        site.by_operator(make_token)
        began = time.monotonic()
        site.by_operator(f"{up.splitlines()[-1]} --yes")
        is_up = time.monotonic()
        with served(site, with_key(serve)):
            site.check_answers("shared_memory", "nixl", "grpc")
            answered = time.monotonic()
        site.by_operator("ray down --yes deploy/ray/cluster.yaml")
        wait_until(lambda: not site.head.programs(), START_S)
        times = f"ray up: {is_up - began:.0f} s; to the first answer: {answered - is_up:.0f} s"
        print(f"{times}; to nothing left: {time.monotonic() - answered:.0f} s", file=sys.stderr)
