"""deploy/ray/cluster.yaml in the gate: `ray up` of two machines on which Ray and torch are installed before, `diptych
serve`, a request, and `ray down`. test_ray_up.py does all that the page says."""

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

PREFILL, OTHERS = "192.168.1.11", ("192.168.1.12", "192.168.1.13")
PROGRAMS = {"ray": "ray.scripts.scripts", "diptych": "diptych.cluster.cli.main"}

# How often Ray looks whether a machine is missing (by itself each 5 s), and how long another machine misses its head
# before Ray ends there (by itself a minute or two).
LOOKS = "AUTOSCALER_UPDATE_INTERVAL_S=1"
ENDS = "RAY_gcs_rpc_server_reconnect_timeout_s=3 RAY_nums_py_gcs_reconnect_retry=0 RAY_py_gcs_connect_timeout_s=3"


@pytest.fixture
def site() -> Iterator[Site]:
    with lan(USER) as found:
        site = Site.on(found, prefill=PREFILL)
        for machine in site.machines:
            give_all(machine)
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
    edit(
        cluster,
        (install, ""),
        (f", {', '.join(OTHERS)}", ""),
        ("RAY_AUTH_MODE=token RAY_w", f"{LOOKS} {ENDS} RAY_AUTH_MODE=token RAY_w"),
    )
    on_head = ("  decode:\n    replicas: 2\n    num_cpus: 8\n    label_selector: {diptych.io/pool: ", "decode}")
    edit(folder / "cluster-config.yaml", ("".join(on_head), f"{on_head[0]}router}}"), ("replicas: 2", "replicas: 1"))
    edit(folder / "cluster-config.yaml", ("/models/model", "tiny"), ("num_cpus: 8", "num_cpus: 1"))
    site.by_operator(make_token)
    began = time.monotonic()
    site.by_operator(f"{up.splitlines()[-1]} --yes")
    is_up = time.monotonic()
    with served(site, serve):
        site.check_answers()
        answered = time.monotonic()
    site.by_operator("ray down --yes deploy/ray/cluster.yaml")
    wait_until(lambda: not any(machine.programs() for machine in site.machines), START_S)
    times = f"ray up: {is_up - began:.0f} s; to the first answer: {answered - is_up:.0f} s"
    print(f"{times}; to nothing left: {time.monotonic() - answered:.0f} s", file=sys.stderr)
