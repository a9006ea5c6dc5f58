"""deploy/ray/cluster.yaml for real: `ray up` from one machine makes a cluster of three others by ssh, as
deploy/ray/README.md says it, and `ray down` ends it."""

import json
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from diptych.kernels.cpu.build import LIBRARY

from ..support.cluster_harness import Served, ready_workers, wait_until
from ..support.machines import ROOT, Machine, end, lan, temporary_folder

pytestmark = [pytest.mark.e2e, pytest.mark.launch, pytest.mark.timeout(3000)]

README = (ROOT / "deploy" / "ray" / "README.md").read_text()
CLUSTER = ROOT / "deploy" / "ray" / "cluster.yaml"
USER, OPERATOR = "diptych", "192.168.1.2"
HEAD, PREFILL, DECODE, SPARE = (f"192.168.1.{number}" for number in (10, 11, 12, 13))
VERSION = version("diptych")
START_S = 900.0  # Ray brings up one machine after the other
SSH_OPTIONS = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
API_KEY = "the key of the clients"
# A request from a machine without anything of Diptych's; prints the answer, or the status of what was refused.
ASK = """
import json, sys, urllib.error, urllib.request
url, key, body = sys.argv[1:]
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
try:
    with urllib.request.urlopen(urllib.request.Request(url, body.encode() or None, headers), timeout=120) as answer:
        print(answer.read().decode())
except urllib.error.HTTPError as e:
    print(json.dumps({"status": e.code}))
"""


def shell_of(text: str) -> list[str]:
    """The blocks of shell commands of a page."""
    return [re.sub(r"(?m)^ +", "", block) for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]


@dataclass
class Site:
    """The operator's machine and those that are to be a cluster."""

    operator: Machine
    head: Machine
    workers: list[Machine]

    @property
    def source(self) -> Path:
        return self.operator.home / "source"

    def ssh(self, machine: Machine, command: str, *, has_terminal: bool = False) -> list[str]:
        """Return the command that runs `command` there from the operator's machine."""
        key = str(self.operator.home / ".ssh" / "id_ed25519")
        options = [f"-o{each}" for each in SSH_OPTIONS]
        terminal = ["-tt"] if has_terminal else []
        return ["ssh", *terminal, "-i", key, *options, f"{machine.user}@{machine.ip}", command]

    def tell(self, machine: Machine, command: str) -> str:
        """Return what `command` prints there."""
        return self.operator.run(self.ssh(machine, command))

    def on_ray(self, command: str) -> str:
        """Return what a command of the environment that talks to the head's Ray prints there."""
        variables = f"RAY_AUTH_MODE=token RAY_ADDRESS={self.head.ip}:6379"
        return self.tell(self.head, f"{variables} ~/diptych-venv/bin/{command}")

    def by_operator(self, command: str) -> str:
        return self.operator.run(["bash", "-ec", command], cwd=self.source)

    def ask(self, path: str, body: dict[str, Any] | None = None, key: str = API_KEY) -> Any:
        url = f"http://{HEAD}:8000{path}"
        return json.loads(self.operator.run([sys.executable, "-c", ASK, url, key, json.dumps(body) if body else ""]))


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
        operator, head = found.add("operator", OPERATOR), found.add("head", HEAD)
        workers = [found.add("prefill", PREFILL), found.add("decode", DECODE)]
        for machine in (head, *workers):
            give_python(machine, packages)
        copy = ["rsync", "-a", "--exclude=.git", "--filter=dir-merge,- .gitignore", f"{ROOT}/", "source"]
        operator.run(copy)
        yield Site(operator, head, workers)


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


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)


@contextmanager
def served(site: Site, command: str) -> Iterator[None]:
    """`diptych serve` at the operator's terminal, by ssh on the head, until Ctrl-C."""
    with site.operator.start(site.ssh(site.head, command, has_terminal=True)) as process:
        found = Served(site.head.home, process)
        with found.reading():
            try:
                found.wait_for("Watch it", START_S)
                yield
                assert process.stdin is not None
                process.stdin.write("\x03")
                process.stdin.flush()
                found.last_line()
            finally:
                end(process)


def test_it_comes_up_serves_scales_is_upgraded_and_goes_down(site: Site) -> None:
    make_token, up, serve, stop = shell_of(README)
    serve = serve.replace('$(python3 -c "import secrets; print(secrets.token_hex(32))")', f"'{API_KEY}'")
    assert API_KEY in serve
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
        check_answers(site)
        print(f"ray up: {is_up - began:.0f} s; then to the first answer: {time.monotonic() - is_up:.0f} s")
        site.on_ray("diptych scale decode=2")
        wait_until(lambda: pools(site) == {"prefill": [PREFILL], "decode": [DECODE, DECODE]}, START_S)
        check_answers(site)
    assert "3 local.cluster.node" in site.on_ray("ray status"), "Ray is left when Diptych has ended"
    edit(site.source / "pyproject.toml", (f'version = "{VERSION}"', f'version = "{VERSION}.post1"'))
    site.by_operator(f"{ray_up} --yes")
    with served(site, serve):
        check_answers(site)
        for machine in (site.head, *site.workers):
            assert f"{VERSION}.post1" in site.tell(machine, "~/diptych-venv/bin/diptych --version")
    site.by_operator("ray down --yes deploy/ray/cluster.yaml")
    for machine in site.workers:
        site.tell(machine, stop)
    wait_until(lambda: not any(machine.programs() for machine in (site.head, *site.workers)), START_S)


def check_answers(site: Site) -> None:
    """Check that a prompt is computed on one machine, its answer on another; and that who has no key is refused."""
    body = {"model": "tiny", "prompt": "What is prefill?", "max_tokens": 8, "temperature": 0, "timings": True}
    answer = site.ask("/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 8
    [timings] = answer["timings"]
    assert timings["transport"] == "grpc" and timings["handoff_bytes"] > 0
    assert site.ask("/v1/completions", body, key="another") == {"status": 401}


def pools(site: Site) -> dict[str, list[str]]:
    """Return the addresses of each pool's workers that are ready."""
    return ready_workers(json.loads(site.on_ray("diptych status --json")))
