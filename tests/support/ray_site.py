"""A Ray on machines of a test, `diptych serve` on its head, and clients on a machine apart."""

import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.cluster.placement.ray_session import make_token

from .cluster_harness import CLI, Served, ready_workers
from .machines import END_S, ROOT, Lan, Machine, Popen, end

API_KEY = "the key of the clients"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
START_S = 600.0
CLIENTS = "192.168.1.2"


class Requests:
    """A load from the clients' machine."""

    def __init__(self, process: Popen) -> None:
        self._process = process

    def until_done(self, number: int) -> None:
        """Wait until so many more have ended. None may have failed."""
        told = self._ask(f"{number}")
        assert not told["errors"] and told["num_done"] >= number

    def forget_gaps(self) -> dict[str, float]:
        """Return the longest times since the last call, in s: `gap`, between two pieces of one answer; `silence`, in
        which no client was sent anything."""
        told = self._ask("forget")
        return {"gap": told["gap_s"], "silence": told["silence_s"]}

    def _ask(self, line: str) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        return json.loads(self._process.stdout.readline())


@dataclass
class RaySite:
    """Machines of which the first is the clients'. `head` is where Ray's head is; on `door` are `diptych serve`, the
    commands and the router: the head, too, until another is named."""

    lan: Lan
    head: Machine
    door: Machine

    @classmethod
    def on(cls, lan: Lan, head_ip: str) -> "RaySite":
        """Add the clients' machine and the head's to a new network, and make Ray's token."""
        lan.add("clients", CLIENTS)
        head = lan.add("head", head_ip)
        site = cls(lan, head, head)
        make_token(site._token)
        return site

    @property
    def _token(self) -> Path:
        return self.lan.folder / "auth_token"

    @property
    def environment(self) -> dict[str, str]:
        """Return what leads to this Ray, and how long its processes wait for the head (deploy/ray/cluster.yaml)."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}
        return token | {
            "RAY_ADDRESS": f"{self.head.ip}:6379",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
            "DIPTYCH_API_KEY": API_KEY,
        }

    def start_ray(self, machine: Machine, *flags: str, env: Mapping[str, str] | None = None) -> None:
        """`ray start` there, with the label `diptych.io/pool`: the machine's name up to a dash."""
        role = ("--head", "--port=6379") if machine is self.head else (f"--address={self.head.ip}:6379",)
        labels = f"--labels=diptych.io/pool={machine.name.partition('-')[0]}"
        sizes = ("--num-cpus=4", "--object-store-memory=83886080")
        command = [*RAY, "start", *role, labels, f"--node-ip-address={machine.ip}", *sizes, *flags]
        machine.run(command, env=self.environment | dict(env or {}))

    def tell(self, *argv: str) -> str:
        """Return what a command of ours prints."""
        return self.door.run([*CLI, *argv], env=self.environment)

    def status(self) -> dict[str, Any]:
        return json.loads(self.tell("status", "--json"))

    def workers(self) -> dict[str, list[str]]:
        """Return the addresses of each pool's workers that are ready."""
        return ready_workers(self.status())

    @contextmanager
    def serving(self, config: str) -> Iterator[Served]:
        """`diptych serve` until the body ends."""
        (self.door.home / "cluster.yaml").write_text(config)
        with self.door.start([*CLI, "serve", "--config", "cluster.yaml"], env=self.environment) as process:
            served = Served(self.door.home, process)
            with served.reading():
                try:
                    served.wait_for("Watch it", START_S)
                    yield served
                finally:
                    end(process, signal.SIGINT)
            print("\n".join(served.output))

    @contextmanager
    def load(self) -> Iterator[Requests]:
        command = [sys.executable, "-m", "tests.support.load_process", f"{self.door.ip}:50051", API_KEY]
        with self.lan.machines[0].start(command, cwd=ROOT) as process:
            try:
                yield Requests(process)
                assert process.stdin is not None
                process.stdin.close()
                process.wait(END_S)
            finally:
                end(process)
