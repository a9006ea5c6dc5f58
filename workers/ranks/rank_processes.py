"""Rank 0's side of the other ranks: their processes, and the memory and the rendezvous that they share.

    start -> join (each has read its weights) -> available_bytes, shared, begin (KV memory) -> [begin_draft] -> meet
      -> ... -> close
      └────────┴────────┴── one ends, or `fail` ──> all are killed ──> on_loss(why)

A worker is whole or it is not: the first rank that ends takes the others with it, and then the worker ends itself, so
that whoever started it can start all of it again. Ranks own nothing that outlives them, so killing them is enough.
If rank 0 dies the kernel kills them: each asks for that (rank.py), and means by it the death of the *thread* that
started it, so that this is a thread which lives as long as they do.
"""

import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from ...kernels.cpu.library import Library
from ...kernels.cpu.ranks import RankSums
from ..common.cores import openmp_settings, part_of
from ..common.errors import ConfigError, RankLost
from ..device.device import Device
from ..device.device_group import DeviceGroup, device_rendezvous
from ..device.joined_memory import Joining, make_link
from ..device.virtual_memory import virtual_memory_of
from ..kv.pool_file import PoolFile
from ..models.layers.step import Int32s, broadcast_message
from ..models.plan.rank_settings import GO, READY, RankSettings
from ..parallel.groups import STALL, GlooGroup, Group

OnLoss = Callable[[RankLost], object]
Joined = TypeVar("Joined")
POLL_S = 1.0
EXIT_S = 1.0  # between a rank's last sign of life and its exit status

log = logging.getLogger("diptych.worker")


class RankProcesses:
    """Ranks 1 to size - 1 of a worker. `on_loss` is called once at most, on a thread of ours, not after `close`."""

    def __init__(self, settings: RankSettings, on_loss: OnLoss, library: Library | None = None) -> None:
        """`settings`: what they have in common; the rest is filled in here. library: they sum with it, through memory.
        Raises ConfigError."""
        memory = PoolFile.make(None, small_pages=True)
        if memory is None:
            raise ConfigError("tensor_parallel > 1 needs the memory files of Linux: use 1")
        self._memory, self._sums_fd = memory, os.memfd_create("diptych-sums")
        self._links: list[socket.socket] = []  # to each of them
        self.kv_links: list[socket.socket] = []  # to the agent of each that has a device of its own
        os.ftruncate(self._sums_fd, RankSums.num_bytes(settings.size))
        self._library = library
        self._control_group: GlooGroup | None = None  # transports step messages
        self._device_group: DeviceGroup | None = None
        self._folder = tempfile.mkdtemp(prefix="diptych-ranks-")
        self._rendezvous = Path(self._folder) / "rendezvous"
        sums_fd = self._sums_fd if library is not None else None
        ends = {"memory_fd": self._memory.fd, "sums_fd": sums_fd, "rendezvous": str(self._rendezvous)}
        self._settings = replace(settings, **ends, parent_pid=os.getpid())
        self._on_loss = on_loss
        self._ready: Future[None] = Future()
        self._wake_read, self._wake_write = os.pipe()
        self._is_closing = False
        self._failure: RankLost | None = None
        self._lost: RankLost | None = None
        self._since: float | None = None  # of running operations that wait for the other ranks
        self._error = RankLost("the worker is closing")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._thread = threading.Thread(target=self._run, name="diptych-ranks", daemon=True)
        self._thread.start()

    def join(self, gpu: Device | None = None) -> Group:
        """Waits until every rank has read its weights. Returns the group that computes: of GPUs, where ours is `gpu`.
        Raises RankLost if one ends instead."""
        self._ready.result()
        for link in self._links:
            with suppress(OSError):  # its end is heard of otherwise
                link.send(GO)
        size, rendezvous = self._settings.size, self._rendezvous
        control_group = self._control_group = self._unless_lost(lambda: GlooGroup.join(0, size, rendezvous))
        if self._library is not None:
            control_group.share(self._library, self._sums_fd)
        if gpu is not None:
            self._device_group = self._unless_lost(lambda: gpu.group(0, size, device_rendezvous(rendezvous)))
        if self._lost is not None:  # a rank was lost while this group was created, so it was not ended with the others
            self._abandon()
        return self._device_group or control_group

    def _unless_lost(self, join: Callable[[], Joined]) -> Joined:
        """Return what `join` gives, unless a rank has ended: `join` would wait for it for long, or for ever, and is
        abandoned."""
        made: Future[Joined] = Future()

        def make() -> None:
            try:
                made.set_result(join())
            except Exception as e:  # noqa: BLE001 - raised where it is waited for
                made.set_exception(e)

        threading.Thread(target=make, name="diptych-join", daemon=True).start()
        with self.waiting():
            while not wait([made], timeout=0.1).done:
                self.check()
        return made.result()

    def available_bytes(self, own: int) -> int:
        """Bytes for the KV of all ranks: with a GPU each, `size` times what the one with the least has free. own: this
        rank's."""
        if self._device_group is None:
            return own
        assert self._control_group is not None
        said = self._control_group.gather(torch.tensor([own]), [(1,)] * self._settings.size)
        return self._settings.size * int(torch.cat(said).min())

    def shared(self, gpu: Device | None) -> PoolFile | Joining:
        """Return the means by which the KV memory of all ranks becomes one pool, see KVCache. Call after `join`."""
        memory = virtual_memory_of(gpu) if gpu is not None else None
        return self._memory if memory is None else Joining(memory, self._links)

    def begin(self, num_blocks: int) -> None:
        """Tell the other ranks to make, or map, their KV memory."""
        self.broadcast(np.array([num_blocks], dtype=np.int32))

    def begin_draft(self) -> None:
        """Tell the other ranks, which have shares of what drafts, that ours is loaded: they make it ready with us."""
        self.broadcast(np.zeros(1, dtype=np.int32))

    def meet(self) -> None:
        """Wait until all ranks are ready for steps."""
        assert self._control_group is not None
        self.broadcast(np.zeros(1, dtype=np.int32))
        self._control_group.meet()
        self._end_rendezvous()

    def broadcast(self, message: Int32s) -> None:
        """Send the other ranks the message of the next step."""
        assert self._control_group is not None
        broadcast_message(self._control_group, message)

    def check(self) -> None:
        """Raise RankLost if a rank was lost, whatever error a device reports for that."""
        if self._lost is not None:
            raise self._lost

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Bound the time for which the code within waits for the other ranks: after STALL they are ended."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    @contextmanager
    def sharing(self, what: str) -> Generator[None]:
        """Bound the time for which the code within, which the other ranks compute with us on devices, waits for them.
        If it fails all ranks end: they wait in the midst of it. Raises RankLost, which names the cause. what: names the
        work."""
        try:
            with self.waiting():
                yield
            self.check()  # whatever a device reports for a lost rank
        except Exception as e:
            error = e if isinstance(e, RankLost) else RankLost(f"rank 0 failed in {what} ({e})")
            raise self.fail(error) from e

    @contextmanager
    def naming(self) -> Generator[None]:
        """Replace a RankLost raised within by the error that ended the rank."""
        try:
            yield
        except RankLost as e:
            cause = self.fail(e)
            if cause is e:
                raise
            raise cause from e

    def fail(self, error: RankLost) -> RankLost:
        """A rank does not do its part, as others see it: end them all. Returns what is to be said of it."""
        self._failure = error
        os.write(self._wake_write, b"f")
        self._thread.join()
        return self._error

    def close(self) -> None:
        """End them; returns when they have ended. Idempotent."""
        self._is_closing = True
        os.write(self._wake_write, b"c")
        self._thread.join()

    def __del__(self) -> None:
        for descriptor in (self._sums_fd, self._wake_read, self._wake_write):
            os.close(descriptor)
        for link in (*self._links, *self.kv_links):
            link.close()

    def _run(self) -> None:
        try:
            for rank in range(1, self._settings.size):
                self._processes.append(self._start(rank))
            self._lost = self._watch()
            self._error = self._lost or self._error
        except OSError as e:
            self._error = RankLost(f"a rank could not be started ({e.strerror}): free memory, or allow more processes")
        finally:
            self._end()
        if not self._ready.done():
            self._ready.set_exception(self._error)
        elif not self._is_closing:
            log.error("%s", self._error)
            self._on_loss(self._error)

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        module = __name__.partition(".")[0] + ".workers.execution.rank"
        cores = part_of(self._settings.cores, rank, self._settings.size)
        env = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | openmp_settings(cores)  # as for the worker itself
        ours, theirs = make_link()
        self._links.append(ours)
        with ExitStack() as stack:
            settings = replace(self._settings, rank=rank, link_fd=stack.enter_context(theirs).fileno())
            passed = [self._memory.fd, self._sums_fd, settings.link_fd]
            if settings.device != "cpu":
                ours, theirs = socket.socketpair()
                self.kv_links.append(ours)
                settings = replace(settings, kv_link_fd=stack.enter_context(theirs).fileno())
                passed.append(settings.kv_link_fd)
            return subprocess.Popen(
                [sys.executable, "-m", module, settings.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=passed,
                env=env,
            )

    def _watch(self) -> RankLost | None:
        """Wait for `close` (None), `fail`, a step that does not end, or the end of a process, which closes its life
        line."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        for process in self._processes:
            assert process.stdout is not None
            poll.register(process.stdout, select.POLLIN)
        num_ready = 0
        while True:
            for descriptor, _ in poll.poll(POLL_S * 1e3):
                if descriptor == self._wake_read:
                    return None if self._is_closing else self._loss()
                if os.read(descriptor, len(READY)) != READY:
                    return None if self._is_closing else self._loss()
                num_ready += 1
            if num_ready == len(self._processes) and not self._ready.done():
                self._ready.set_result(None)
            since, stall_s = self._since, STALL.total_seconds()
            if since is not None and time.monotonic() - since > stall_s:
                self._failure = RankLost(f"what the ranks do together has not ended within {stall_s:.0f} s")
                return self._loss()

    def _loss(self) -> RankLost:
        """Describe who ended and how. Where one was killed, the others' own ends are its consequence."""
        until = time.monotonic() + EXIT_S
        while all(p.poll() is None for p in self._processes) and time.monotonic() < until:
            time.sleep(0.01)
        statuses = {rank: process.returncode for rank, process in enumerate(self._processes, 1)}
        ended = {rank: status for rank, status in statuses.items() if status is not None}
        killed = {rank: status for rank, status in ended.items() if status < 0}
        how = [
            f"rank {rank} was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"rank {rank} ended with status {status}"
            for rank, status in (killed or ended).items()
        ]
        why = ", ".join(how) or str(self._failure or "a rank has said what none says")
        return RankLost(f"{why}: all {self._settings.size} ranks of the worker end with it")

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        self._abandon()
        for process in self._processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._end_rendezvous()

    def _abandon(self) -> None:
        for group in (self._control_group, self._device_group):
            if group is not None:
                group.abandon()

    def _end_rendezvous(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
