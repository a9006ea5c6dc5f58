"""`diptych serve` as a job of the Ray that `ray up` made, as deploy/ray/README.md says it: its end is the cluster's."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest

from ..support.cluster_harness import wait_until
from ..support.machines import lan
from ..support.owned_folders import temporary_folder
from ..support.ray_up import HEAD, README, START_S, USER, Site, for_one_machine, give_all, shell_of, with_key

pytestmark = [pytest.mark.e2e, pytest.mark.launch]

FREE = re.compile(r"\b0\.0/\d+\.0 CPU")

LISTENS = "(exec 3<> /dev/tcp/127.0.0.1/8265) 2> /dev/null && echo yes || true"


@pytest.fixture
def api() -> Iterator[Path]:
    """Folder of the packages that Ray's API needs beside Ray's own, those of `ray[default]`."""
    wanted = [each.partition(";")[0] for each in requires("ray") or () if re.search(r"extra == .default.", each)]
    with temporary_folder("api") as folder:
        pip = [sys.executable, "-m", "pip", "install", "-qqq", "--no-compile", "--target", str(folder)]
        subprocess.run([*pip, *wanted], check=True)
        yield folder


def test_the_cluster_of_a_job_ends_with_it(api: Path) -> None:
    make_token, up, _, _, submit, stop = shell_of(README)[:6]
    with lan(USER) as found:
        site = Site.on(found)
        give_all(site.head, api)
        for_one_machine(site)
        site.by_operator(make_token)
        site.by_operator(f"{up.splitlines()[-1]} --yes")
        wait_until(lambda: "yes" in site.tell(site.head, LISTENS), START_S)  # Ray's API begins after `ray start` ends
        export, _, delete = stop.splitlines()
        for _ in range(2):  # the second by the same name
            site.tell(site.head, f"{export}\n{delete} || true")  # Ray may have written down the first one's end late
            site.tell(site.head, with_key(submit))
            wait_until(lambda: site.pools() == {"prefill": [HEAD], "decode": [HEAD]}, START_S)
            site.check_answers("shared_memory", "nixl", "grpc")
            began = time.monotonic()
            site.tell(site.head, stop)
            print(f"ray job stop: {time.monotonic() - began:.0f} s")
            assert "no cluster" in site.on_ray("diptych status 2>&1; test $? = 3")
            wait_until(lambda: FREE.search(site.on_ray("ray status")) is not None, START_S)
