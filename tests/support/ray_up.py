"""deploy/ray/cluster.yaml on machines of a test: the operator's, and those that are to be a cluster."""

import json
import re
import shutil
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from diptych.kernels.cpu.build import LIBRARY

from .cluster_harness import Served, ready_workers
from .machines import ROOT, Lan, Machine, end

README = (ROOT / "deploy" / "ray" / "README.md").read_text()
CLUSTER = ROOT / "deploy" / "ray" / "cluster.yaml"
USER, OPERATOR = "diptych", "192.168.1.2"
HEAD = "192.168.1.10"
WORKERS = ("192.168.1.11", "192.168.1.12", "192.168.1.13")
FEW = "num_cpus: 0.25\n    threads: 1"  # all of it is on one machine, which may have two cores
PROGRAMS = {"ray": "ray.scripts.scripts", "diptych": "diptych.cluster.cli.main"}
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

    @classmethod
    def on(cls, lan: Lan, **workers: str) -> "Site":
        """Make the machines, with addresses of the workers, and give the operator the source."""
        operator, head = lan.add("operator", OPERATOR), lan.add("head", HEAD)
        site = cls(operator, head, [lan.add(name, ip) for name, ip in workers.items()])
        operator.run(["rsync", "-a", "--exclude=.git", "--filter=dir-merge,- .gitignore", f"{ROOT}/", "source"])
        return site

    @property
    def machines(self) -> list[Machine]:
        """The machines of the cluster."""
        return [self.head, *self.workers]

    def pools(self) -> dict[str, list[str]]:
        """Return the addresses of each pool's workers that are ready; none where no cluster runs."""
        return ready_workers(json.loads(self.on_ray("diptych status --json || echo '{\"workers\": []}'")))

    def check_answers(self, *transports: str) -> None:
        """Check that a prompt is computed by one worker, its answer by another, to which KV goes by one of
        `transports`; and that who has no key is refused."""
        body = {"model": "tiny", "prompt": "What is prefill?", "max_tokens": 8, "temperature": 0, "timings": True}
        answer = self.ask("/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 8
        [timings] = answer["timings"]
        assert timings["transport"] in transports and timings["handoff_bytes"] > 0
        assert self.ask("/v1/completions", body, key="another") == {"status": 401}


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)


def with_key(commands: str) -> str:
    """The page's commands with the clients' key in place of a random one."""
    made = 'python3 -c "import secrets; print(secrets.token_hex(32))"'
    changed = commands.replace(f"$({made})", f"'{API_KEY}'").replace(made, f"echo '{API_KEY}'")
    assert API_KEY in changed
    return changed


def give_all(machine: Machine, *more: Path) -> None:
    """~/diptych-venv with the packages of this test and `more` folders of packages, and Diptych from where `ray up`
    copies it to."""
    environment = machine.home / "diptych-venv"
    venv.create(environment)
    [packages] = environment.glob("lib/python3*/site-packages")
    folders = [machine.home, Path(httpx.__file__).parents[1], *more]
    (packages / "all.pth").write_text("".join(f"{folder}\n" for folder in folders))
    for name, module in PROGRAMS.items():
        program = environment / "bin" / name
        program.write_text(f"#!{environment}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        program.chmod(0o755)
    (machine.home / ".bashrc").touch()
    if (library := ROOT / "kernels" / "cpu" / LIBRARY).exists():
        kernels = machine.home / "diptych" / "kernels" / "cpu"
        kernels.mkdir(parents=True)
        shutil.copy(library, kernels)


def for_one_machine(site: Site) -> None:
    """Change the files for a head alone, on which `give_all` has installed all."""
    folder = site.source / "deploy" / "ray"
    cluster = folder / "cluster.yaml"
    [install] = re.findall(r"  - .*pip install.*\n", cluster.read_text())
    edit(cluster, (install, ""), (f"[{', '.join(WORKERS)}]", "[]"))
    one = [(f"{{diptych.io/pool: {pool}}}", "{diptych.io/pool: router}") for pool in ("prefill", "decode")]
    edit(folder / "cluster-config.yaml", *one, ("replicas: 2", "replicas: 1"), ("num_cpus: 8", FEW))
    edit(folder / "cluster-config.yaml", ("/models/model", "tiny"))


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
