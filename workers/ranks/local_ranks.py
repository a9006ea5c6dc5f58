"""Processes of a worker's ranks on this machine, as whoever starts them holds them: rank 0's process
(rank_processes.py), or a rank host (rank_host.py).

    start -> READY of each (it has read its weights) -> go -> ... -> end

Standard output of a rank is its life line: READY, and its end. Standard input is for GO. Ranks own nothing that
outlives them, so killing them is enough.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from ..common.cores import openmp_settings, part_of
from ..kv.pool_pieces import make_link
from ..models.plan.rank_settings import GO, READY, RankSettings

EXIT_S = 1.0  # between a rank's last sign of life and its exit status


class LocalRanks:
    """Owner of the processes. `links`: to each of them, for descriptors of memory, where this process is the
    machine's first rank; `kv_links`: to the agent of each that has a device, where no rank is on another machine."""

    def __init__(self, settings: RankSettings, ranks: range) -> None:
        """settings: what they have in common. ranks: to start, where the machine's first one may be this process."""
        self._settings, self.ranks = settings, ranks
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._num_ready = 0
        self.links: list[socket.socket] = []
        self.kv_links: list[socket.socket] = []

    @property
    def life_lines(self) -> list[int]:
        """Descriptors to poll."""
        return [process.stdout.fileno() for process in self._processes.values() if process.stdout is not None]

    @property
    def are_ready(self) -> bool:
        return self._num_ready == len(self.ranks)

    def start(self, machine_kv: socket.socket | None = None) -> None:
        """Call on a thread that lives as long as they do: the kernel kills them with it. machine_kv: the connection on
        which the first one serves this machine's KV, if the first one is not this process. Raises OSError."""
        first, *others = self._settings.machine_ranks
        with ExitStack() as stack:
            if first in self.ranks:
                pairs = [make_link() for _ in others]
                for ours, theirs in pairs:
                    stack.enter_context(ours)
                    stack.enter_context(theirs)
                fds = tuple(ours.fileno() for ours, _ in pairs)
                kv_fd = -1 if machine_kv is None else machine_kv.fileno()
                self._start(first, peer_fds=fds, machine_kv_fd=kv_fd)
                for rank, (_, theirs) in zip(others, pairs, strict=True):
                    self._start(rank, link_fd=theirs.fileno())
                return
            for rank in self.ranks:
                ours, theirs = make_link()
                self.links.append(ours)
                link_fd, kv_link_fd = stack.enter_context(theirs).fileno(), -1
                if self._settings.device != "cpu" and self._settings.num_machines == 1:
                    ours, theirs = socket.socketpair()
                    self.kv_links.append(ours)
                    kv_link_fd = stack.enter_context(theirs).fileno()
                self._start(rank, link_fd=link_fd, kv_link_fd=kv_link_fd)

    def _start(
        self,
        rank: int,
        *,
        link_fd: int = -1,
        kv_link_fd: int = -1,
        peer_fds: Sequence[int] = (),
        machine_kv_fd: int = -1,
    ) -> None:
        settings = replace(
            self._settings,
            rank=rank,
            link_fd=link_fd,
            kv_link_fd=kv_link_fd,
            peer_fds=tuple(peer_fds),
            machine_kv_fd=machine_kv_fd,
            parent_pid=os.getpid(),
        )
        given = (settings.memory_fd, settings.sums_fd, link_fd, kv_link_fd, machine_kv_fd, *peer_fds)
        module = __name__.partition(".")[0] + ".workers.execution.rank"
        cores = part_of(settings.cores, *settings.place_on_machine)
        self._processes[rank] = subprocess.Popen(
            [sys.executable, "-m", module, settings.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd for fd in given if fd is not None and fd >= 0],
            env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | openmp_settings(cores),  # as for the worker itself
        )

    def hear(self, life_line: int) -> bool:
        """Read what a life line says. Returns False where the rank has ended."""
        if os.read(life_line, len(READY)) != READY:
            return False
        self._num_ready += 1
        return True

    def go(self) -> None:
        """Tell them that all ranks are ready."""
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(OSError):  # its end is heard of otherwise
                process.stdin.write(GO)
                process.stdin.flush()

    def how_ended(self) -> str:
        """Describe who has ended and how; empty where none has. Where one was killed, the others' own ends are its
        consequence."""
        until = time.monotonic() + EXIT_S
        while all(p.poll() is None for p in self._processes.values()) and time.monotonic() < until:
            time.sleep(0.01)
        statuses = {rank: process.returncode for rank, process in self._processes.items()}
        ended = {rank: status for rank, status in statuses.items() if status is not None}
        killed = {rank: status for rank, status in ended.items() if status < 0}
        return ", ".join(
            f"rank {rank} was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"rank {rank} ended with status {status}"
            for rank, status in (killed or ended).items()
        )

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def end(self) -> None:
        """Kill them; returns when they have ended. Idempotent."""
        self.kill()
        for process in self._processes.values():
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # GO that it did not read
                        pipe.close()

    def close_links(self) -> None:
        for link in (*self.links, *self.kv_links):
            link.close()
