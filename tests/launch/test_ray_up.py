"""deploy/ray/cluster.yaml for real: `ray up` from one machine makes a cluster of three others by ssh, as
deploy/ray/README.md says it, and `ray down` ends it."""

import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from diptych.kernels.cpu.build import LIBRARY

from ..support.cluster_harness import wait_until
from ..support.machines import ROOT, Machine, lan
from ..support.owned_folders import temporary_folder
from ..support.ray_up import CLUSTER, README, START_S, USER, Site, edit, served, shell_of, with_key

pytestmark = [pytest.mark.e2e, pytest.mark.launch, pytest.mark.timeout(3000)]

PREFILL, DECODE, SPARE = (f"192.168.1.{number}" for number in (11, 12, 13))
VERSION = version("diptych")


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    """Folder of packages for machines without a network beyond their own: what Ray needs, and what builds wheels."""
    [ray] = re.findall(r'"(ray\[default\]==[\d.]+)"', CLUSTER.read_text())
    with temporary_folder("packages") as folder:
        pip = [sys.executable, "-m", "pip", "download", "-qqq", "--dest", str(folder)]
        subprocess.run([*pip, ray, "setuptools>=77"], check=True)
        yield folder


@pytest.fixture
def site(packages: Path) -> Iterator[Site]:
    with lan(USER) as found:
        site = Site.on(found, prefill=PREFILL, decode=DECODE)
        for machine in site.machines:
            give_python(machine, packages)
        yield site


def give_python(machine: Machine, packages: Path) -> None:
    """~/diptych-venv, as the machine's owner may have made it, with large packages: all but Ray and Diptych."""
    environment = machine.home / "diptych-venv"
    venv.create(environment, with_pip=True)
    [site_packages] = environment.glob("lib/python3*/site-packages")
    shared = machine.folder / "shared-packages"
    shared.mkdir()
    own = re.compile(r"ray(-|$)|diptych|__editable__|.*\.pth$|pip(-|$)|setuptools(-|$)")
    for entry in Path(pytest.__file__).parents[1].iterdir():
        if not own.match(entry.name):
            (shared / entry.name).symlink_to(entry)
    (site_packages / "shared.pth").write_text(f"{shared}\n")
    (machine.home / ".bashrc").touch()
    pip = machine.home / ".config" / "pip" / "pip.conf"
    pip.parent.mkdir(parents=True)
    pip.write_text(f"[global]\nno-index = true\nfind-links = {packages}\ndisable-pip-version-check = true\n")
    kernels = machine.home / "diptych" / "kernels" / "cpu"  # compiled there before: else each does, for a minute
    kernels.mkdir(parents=True)
    shutil.copy(ROOT / "kernels" / "cpu" / LIBRARY, kernels)


def test_it_comes_up_serves_scales_is_upgraded_and_goes_down(site: Site) -> None:
    make_token, up, serve, stop = shell_of(README)[:4]
    serve = with_key(serve)
    folder = site.source / "deploy" / "ray"
    edit(folder / "cluster.yaml", (f", {SPARE}", ""), (f"|{SPARE}", ""))
    edit(
        folder / "cluster-config.yaml",
        ("/models/model", "tiny"),
        ("num_cpus: 8", "num_cpus: 1"),
        ("replicas: 2", "replicas: 1"),
    )
    site.by_operator(make_token)
    ray_up = up.splitlines()[-1]
    assert ray_up.endswith("ray up deploy/ray/cluster.yaml")
    began = time.monotonic()
    site.by_operator(f"{ray_up} --yes")
    is_up = time.monotonic()
    with served(site, serve):
        site.check_answers("grpc")
        print(f"ray up: {is_up - began:.0f} s; then to the first answer: {time.monotonic() - is_up:.0f} s")
        site.on_ray("diptych scale decode=2")
        wait_until(lambda: site.pools() == {"prefill": [PREFILL], "decode": [DECODE, DECODE]}, START_S)
        site.check_answers("grpc")
    assert "3 local.cluster.node" in site.on_ray("ray status"), "Ray is left when Diptych has ended"
    edit(site.source / "pyproject.toml", (f'version = "{VERSION}"', f'version = "{VERSION}.post1"'))
    site.by_operator(f"{ray_up} --yes")
    with served(site, serve):
        site.check_answers("grpc")
        for machine in site.machines:
            assert f"{VERSION}.post1" in site.tell(machine, "~/diptych-venv/bin/diptych --version")
    site.by_operator("ray down --yes deploy/ray/cluster.yaml")
    for machine in site.workers:
        site.tell(machine, stop)
    wait_until(lambda: not any(machine.programs() for machine in site.machines), START_S)
