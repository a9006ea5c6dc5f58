"""deploy/ray/cluster.yaml in the gate: `ray up` of a head alone, on which Ray and torch are installed before, `diptych
serve`, a request, and `ray down`. test_ray_up.py does all that the page says, with the other machines."""

import re
import shutil
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.kernels.cpu.build import LIBRARY

from ..support.cluster_harness import wait_until
from ..support.machines import ROOT, Machine, lan
from ..support.ray_up import API_KEY, README, START_S, USER, Site, edit, served, shell_of

pytestmark = [pytest.mark.e2e, pytest.mark.launch, pytest.mark.cluster]

WORKERS = ("192.168.1.11", "192.168.1.12", "192.168.1.13")
FEW = "num_cpus: 0.25\n    threads: 1"  # all of it is on one machine, which may have two cores
PROGRAMS = {"ray": "ray.scripts.scripts", "diptych": "diptych.cluster.cli.main"}


@pytest.fixture
def site() -> Iterator[Site]:
    with lan(USER) as found:
        site = Site.on(found)
        give_all(site.head)
        yield site


def give_all(machine: Machine) -> None:
    """~/diptych-venv with the packages of this test, and Diptych from where `ray up` copies it to."""
    environment = machine.home / "diptych-venv"
    venv.create(environment)
    [packages] = environment.glob("lib/python3*/site-packages")
    (packages / "all.pth").write_text(f"{machine.home}\n{Path(pytest.__file__).parents[1]}\n")
    for name, module in PROGRAMS.items():
        program = environment / "bin" / name
        program.write_text(f"#!{environment}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        program.chmod(0o755)
    (machine.home / ".bashrc").touch()
    if (library := ROOT / "kernels" / "cpu" / LIBRARY).exists():
        kernels = machine.home / "diptych" / "kernels" / "cpu"
        kernels.mkdir(parents=True)
        shutil.copy(library, kernels)


def test_ray_up_serves_and_ray_down_leaves_nothing(site: Site) -> None:
    make_token, up, serve = shell_of(README)[:3]
    serve = re.sub(r"\$\(python3 .*\)", f"'{API_KEY}'", serve)
    folder = site.source / "deploy" / "ray"
    cluster = folder / "cluster.yaml"
    [install] = re.findall(r"  - .*pip install.*\n", cluster.read_text())
    edit(cluster, (install, ""), (f"[{', '.join(WORKERS)}]", "[]"))
    one = [(f"{{diptych.io/pool: {pool}}}", "{diptych.io/pool: router}") for pool in ("prefill", "decode")]
    edit(folder / "cluster-config.yaml", *one, ("replicas: 2", "replicas: 1"), ("num_cpus: 8", FEW))
    edit(folder / "cluster-config.yaml", ("/models/model", "tiny"))
    site.by_operator(make_token)
    began = time.monotonic()
    site.by_operator(f"{up.splitlines()[-1]} --yes")
    is_up = time.monotonic()
    with served(site, serve):
        site.check_answers("shared_memory", "nixl", "grpc")
        answered = time.monotonic()
    site.by_operator("ray down --yes deploy/ray/cluster.yaml")
    wait_until(lambda: not site.head.programs(), START_S)
    times = f"ray up: {is_up - began:.0f} s; to the first answer: {answered - is_up:.0f} s"
    print(f"{times}; to nothing left: {time.monotonic() - answered:.0f} s", file=sys.stderr)
