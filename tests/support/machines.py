"""Machines of a test, on this one: each has a network, processes, a home, /tmp and /dev/shm of its own, and is reached
by ssh.

A machine is one process, `sshd`, with Linux namespaces of its own, and what descends from it: they all end when it is
killed. Their network is a bridge inside the first machine, which nothing outside reaches. Needs root, and Debian's
packages openssh-server, rsync, iproute2 and util-linux.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from .owned_folders import WITH_ITS_CALLER, temporary_folder

ROOT = Path(__file__).parents[2]
NEEDED = (
    "/usr/bin/unshare",
    "/usr/bin/setpriv",
    "/usr/sbin/sshd",
    "/usr/bin/ssh",
    "/usr/bin/rsync",
    "/usr/bin/ssh-keygen",
    "/sbin/ip",
)
SPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
END_S = 120.0
KEPT = (ROOT, Path(sys.prefix), Path(sys.base_prefix))  # seen by every machine, also where they are in /tmp
# Makes the machine around itself, waits for its network, and becomes its sshd.
MACHINE = """
set -eu
mount --make-rprivate /
for kept in {kept}; do case $kept in /tmp/*)
  mkdir -p {folder}$kept; mount --bind $kept {folder}$kept;; esac; done
mount --rbind {folder}/tmp /tmp
mount --bind {folder}/passwd /etc/passwd
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p {folder}/cgroup
mount --rbind /sys/fs/cgroup {folder}/cgroup
mount -t sysfs sysfs /sys
mount --rbind {folder}/cgroup /sys/fs/cgroup
mkdir /run/sshd
hostname {name}
ip link set lo up
echo isolated
read -r _
ip address add {ip}/24 dev {device}
ip link set {device} up
exec /usr/sbin/sshd -D -f {folder}/sshd_config
"""
SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/home/.ssh/id_ed25519.pub
ListenAddress {ip}
PasswordAuthentication no
UsePAM no
PidFile none
Subsystem sftp internal-sftp
"""


def missing() -> list[str]:
    """Return what this machine lacks for others to be made on it; empty where they can be."""
    lacking = [path for path in NEEDED if not Path(path).exists()] + (["root"] if os.geteuid() else [])
    return lacking or ([] if _has_namespaces() else ["namespaces and network bridges"])


def _has_namespaces() -> bool:
    """Return whether a machine can be made: in a container, root may not be allowed to."""
    probe = ["unshare", *SPACES, "ip", "link", "add", "lan", "type", "bridge"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


Popen = subprocess.Popen[str]


def end(process: Popen, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to what `Machine.start` has started (a child of this process's child), and wait for it."""
    if process.poll() is None:
        for inside in psutil.Process(process.pid).children(recursive=True):
            inside.send_signal(number)
    process.wait(END_S)


@dataclass
class Machine:
    name: str
    ip: str
    user: str
    folder: Path
    process: "subprocess.Popen[str]"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def pid(self) -> int:
        """Return the number of its first process on this machine."""
        [child] = psutil.Process(self.process.pid).children()
        return child.pid

    def command(self, argv: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> list[str]:
        """Return the command that runs `argv` on it, in `cwd` or its home, as its user does at its keyboard."""
        inside = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--ipc", "--pid"]
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"])
        own = {"HOME": str(self.home), "USER": self.user, "LOGNAME": self.user, "PATH": path} | dict(env or {})
        modules = [found["PYTHONPATH"] for found in (own, os.environ) if "PYTHONPATH" in found]
        if modules:  # those of this test
            own["PYTHONPATH"] = os.pathsep.join(modules)
        given = [f"{key}={value}" for key, value in own.items()]
        return [*inside, "env", f"--chdir={cwd or self.home}", "-i", *given, *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        limit_s: float = 900,
    ) -> str:
        """Run it to its end; return its standard output. Raises AssertionError, with all output, where it fails."""
        done = subprocess.run(
            self.command(argv, cwd, env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Popen:
        """Start it, with pipes for its input and its output."""
        return subprocess.Popen(
            self.command(argv, cwd, env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )

    def programs(self) -> list[str]:
        """Names of the processes that run on it, beside its sshd."""
        found: list[str] = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if process.status() != psutil.STATUS_ZOMBIE and process.name() != "sshd":
                    found.append(process.name())
        return found

    def kill(self) -> None:
        """End it and everything on it at once, as a loss of power does."""
        psutil.Process(self.pid).kill()
        self.process.wait()


class Lan:
    """Machines on one bridge, which is inside the first."""

    def __init__(self, folder: Path, user: str) -> None:
        self.folder, self._user = folder, user
        self.machines: list[Machine] = []

    def named(self, name: str) -> Machine:
        return next(machine for machine in self.machines if machine.name == name)

    def add(self, name: str, ip: str) -> Machine:
        """Start a machine. All accept the key ~/.ssh/id_ed25519 of each."""
        folder = self.folder / name
        (folder / "tmp").mkdir(parents=True)
        (folder / "home").mkdir(mode=0o700)
        self._keys(folder)
        users = Path("/etc/passwd").read_text().splitlines()
        own = f"{self._user}:x:0:0::{folder}/home:/bin/bash"
        others = [line for line in users if not line.startswith(("root:", f"{self._user}:"))]
        (folder / "passwd").write_text("\n".join([own, *others]) + "\n")
        (folder / "sshd_config").write_text(SSHD.format(folder=folder, ip=ip))
        number = len(self.machines)
        machine = Machine(name, ip, self._user, folder, self._boot(name, ip, folder, number))
        self._link(machine, number)
        self.machines.append(machine)
        return machine

    def boot_again(self, machine: Machine) -> None:
        """Start a machine that was killed, with the files that it had, but for those in /dev/shm and /run."""
        assert machine.process.poll() is not None and machine.process.stdout is not None
        machine.process.stdout.close()
        number = self.machines.index(machine)
        machine.process = self._boot(machine.name, machine.ip, machine.folder, number)
        self._link(machine, number)

    def _boot(self, name: str, ip: str, folder: Path, number: int) -> "subprocess.Popen[str]":
        """`number`: of the machine, from 0. It waits for its network."""
        script = MACHINE.format(
            kept=" ".join(str(path.resolve()) for path in KEPT),
            folder=folder,
            name=name,
            ip=ip,
            device=_device(number),
        )
        process = subprocess.Popen(
            [*WITH_ITS_CALLER, "unshare", *SPACES, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "isolated\n"
        return process

    def _keys(self, folder: Path) -> None:
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
        subprocess.run([*make, str(folder / "host_key")], check=True)
        own = folder / "home" / ".ssh"
        if self.machines:
            shutil.copytree(self.machines[0].home / ".ssh", own)
        else:
            own.mkdir(mode=0o700)
            subprocess.run([*make, str(own / "id_ed25519")], check=True)

    def _link(self, machine: Machine, number: int) -> None:
        if not number:
            self._ip(machine, "link", "add", _device(number), "type", "bridge")
        else:
            first, port = self.machines[0], f"port{number}"
            # That of a machine that was killed goes by itself, but later.
            delete = ["nsenter", f"--target={first.pid}", "--net", "ip", "link", "delete", port]
            subprocess.run(delete, stderr=subprocess.DEVNULL, check=False)
            pair = ("type", "veth", "peer", "name", _device(number), "netns", str(machine.pid))
            self._ip(first, "link", "add", port, "netns", str(first.pid), *pair, outside=True)
            self._ip(first, "link", "set", port, "master", "lan", "up")
        assert machine.process.stdin is not None
        machine.process.stdin.write("linked\n")
        machine.process.stdin.close()

    def cut(self, machine: Machine) -> None:
        """Cut its cable: it runs on, and nothing reaches it."""
        self._ip(self.machines[0], "link", "set", f"port{self.machines.index(machine)}", "down")

    def _ip(self, machine: Machine, *argv: str, outside: bool = False) -> None:
        inside = [] if outside else ["nsenter", f"--target={machine.pid}", "--net"]
        subprocess.run([*inside, "ip", *argv], check=True)


def _device(number: int) -> str:
    """Name of a machine's network device; the first's is the bridge."""
    return f"eth{number}" if number else "lan"


@contextmanager
def lan(user: str) -> Iterator[Lan]:
    """A network without machines yet; those that are added end with it, and their folders are removed."""
    with temporary_folder("lan") as folder:
        found = Lan(folder, user)
        try:
            yield found
        finally:
            for machine in reversed(found.machines):
                machine.process.kill()  # --kill-child: its first process goes with it, so all
                machine.process.wait()
                assert machine.process.stdout is not None
                machine.process.stdout.close()
