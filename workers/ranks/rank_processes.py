"""Rank 0's side of the other ranks: their processes, and the memory and the place to meet that they share.

    start -> join (each has read its weights) -> available_bytes, shared, begin (KV memory) -> [begin_draft] -> meet
      -> ... -> close
      └────────┴────────┴── one ends, or `fail` ──> all are killed ──> on_loss(why)

Those of this machine are processes of ours (local_ranks.py), those of others belong to rank hosts (remote_ranks.py). A
worker is whole or it is not: the first rank that ends takes the others with it, and then the worker ends itself, so
that whoever started it can start all of it again. If rank 0 dies the kernel kills its machine's: each asks for that
(rank.py), and means by it the death of the *thread* that started it, so that this is a thread which lives as long as
they do.
"""

import logging
import os
import select
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from ...kernels.cpu.library import Library
from ...kernels.cpu.ranks import RankSums
from ..common.errors import ConfigError, RankLost
from ..device.device import Device
from ..device.device_group import DeviceGroup
from ..device.joined_memory import Joining
from ..device.virtual_memory import virtual_memory_of
from ..kv.pool_file import PoolFile
from ..models.layers.step import Int32s, broadcast_message
from ..models.plan.rank_settings import RankSettings
from ..parallel.groups import GlooGroup, Group
from ..parallel.stores import DEVICES, STALL, NetworkPlace, NetworkStore, Place, place_beside
from .local_ranks import LocalRanks
from .remote_ranks import RemoteRanks
from .waits import Waits

OnLoss = Callable[[RankLost], object]
Joined = TypeVar("Joined")
POLL_S = 1.0

log = logging.getLogger("diptych.worker")


@dataclass(frozen=True, slots=True)
class OtherMachines:
    """Rank hosts of a worker whose ranks are on several machines, and how they are reached."""

    rank_hosts: Sequence[str]  # HOST:PORT of each
    store: NetworkStore  # at an address of this machine; closed with the ranks
    token: str | None


class RankProcesses:
    """Ranks 1 to size - 1 of a worker. `on_loss` is called once at most, on a thread of ours, not after `close`."""

    def __init__(
        self,
        settings: RankSettings,
        on_loss: OnLoss,
        library: Library | None = None,
        others: OtherMachines | None = None,
    ) -> None:
        """`settings`: what they have in common; the rest is filled in here. library: they sum with it, through memory,
        where all are on this machine. Raises ConfigError."""
        memory = PoolFile.make(None, small_pages=True)
        if memory is None:
            raise ConfigError("tensor_parallel > 1 needs the memory files of Linux: use 1")
        self._memory, self._sums_fd = memory, os.memfd_create("diptych-sums")
        os.ftruncate(self._sums_fd, RankSums.num_bytes(settings.size))
        self._library = library if others is None else None
        self._others = others
        self._control_group: GlooGroup | None = None  # transports step messages
        self._device_group: DeviceGroup | None = None
        self._folder = tempfile.mkdtemp(prefix="diptych-ranks-")
        self._place: Place = Path(self._folder) / "rendezvous"
        if others is None:
            settings = replace(settings, rendezvous=str(self._place))
        else:
            self._place = NetworkPlace(others.store.address, others.store.host)
            settings = replace(settings, rendezvous=others.store.address, own_host=others.store.host)
        sums_fd = self._sums_fd if self._library is not None else None
        self._settings = replace(settings, memory_fd=self._memory.fd, sums_fd=sums_fd)
        self._local = LocalRanks(self._settings, range(1, self._settings.machine_ranks.stop))
        self._remote: list[RemoteRanks] = []
        self._on_loss = on_loss
        self._ready: Future[None] = Future()
        self._wake_read, self._wake_write = os.pipe()
        self._is_closing = False
        self._failure: RankLost | None = None
        self._lost: RankLost | None = None
        self._waits = Waits()
        self._error = RankLost("the worker is closing")
        self._thread = threading.Thread(target=self._run, name="diptych-ranks", daemon=True)
        self._thread.start()

    def join(self, gpu: Device | None = None) -> Group:
        """Waits until every rank has read its weights. Returns the group that computes: of GPUs, where ours is `gpu`.
        Raises RankLost if one ends instead."""
        self._ready.result()
        self._local.go()
        for machine in self._remote:
            machine.go()
        size, place = self._settings.size, self._place
        control_group = self._control_group = self._unless_lost(lambda: GlooGroup.join(0, size, place))
        if self._library is not None:
            control_group.share(self._library, self._sums_fd)
        if gpu is not None:
            self._device_group = self._unless_lost(lambda: gpu.group(0, size, place_beside(place, DEVICES)))
        if self._lost is not None:  # a rank was lost while this group was created, so it was not ended with the others
            self._abandon()
        return self._device_group or control_group

    @property
    def kv_links(self) -> Sequence[socket.socket]:
        """Sockets to the agents of ranks that have devices of their own, where all ranks are on this machine."""
        return self._local.kv_links if self._others is None else ()

    @property
    def machine_links(self) -> Sequence[tuple[range, socket.socket]]:
        """The ranks of each other machine, and a connection to the first of them, which serves their KV."""
        return [(machine.ranks, machine.kv_link) for machine in self._remote]

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
        rank's, or with no GPU this machine's."""
        if self._device_group is None and self._others is None:
            return own
        if self._device_group is None:
            own //= len(self._settings.machine_ranks)
        assert self._control_group is not None
        said = self._control_group.gather(torch.tensor([own]), [(1,)] * self._settings.size)
        return self._settings.size * int(torch.cat(said).min())

    def shared(self, gpu: Device | None) -> PoolFile | Joining:
        """Return the means by which the KV memory of all ranks becomes one pool, see KVCache. Call after `join`."""
        memory = virtual_memory_of(gpu) if gpu is not None else None
        return self._memory if memory is None else Joining(memory, self._local.links)

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

    def waiting(self) -> AbstractContextManager[None]:
        """Bound the time for which the code within waits for the other ranks: after STALL they are ended."""
        return self._waits.waiting()

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
        self._local.close_links()

    def _run(self) -> None:
        try:
            self._local.start()
            self._start_others()
            self._lost = self._watch()
            self._error = self._lost or self._error
        except RankLost as e:
            self._error = e
        except OSError as e:
            self._error = RankLost(f"a rank could not be started ({e.strerror}): free memory, or allow more processes")
        finally:
            self._end()
        if not self._ready.done():
            self._ready.set_exception(self._error)
        elif not self._is_closing:
            log.error("%s", self._error)
            self._on_loss(self._error)

    def _start_others(self) -> None:
        """Raises RankLost."""
        if self._others is None:
            return
        num_local = len(self._settings.machine_ranks)
        for number, address in enumerate(self._others.rank_hosts, 1):
            theirs = replace(self._settings, rank=number * num_local, own_host=host_part(address), sums_fd=None)
            self._remote.append(RemoteRanks(address, theirs, self._others.token))

    def _watch(self) -> RankLost | None:
        """Wait for `close` (None), `fail`, a step that does not end, or the end of a process, which closes its life
        line."""
        poll, remote = select.poll(), {machine.fileno(): machine for machine in self._remote}
        for descriptor in (self._wake_read, *self._local.life_lines, *remote):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(POLL_S * 1e3):
                if descriptor == self._wake_read:
                    return None if self._is_closing else self._loss()
                if (machine := remote.get(descriptor)) is not None:
                    why = machine.hear()
                else:
                    why = None if self._local.hear(descriptor) else ""  # `_loss` says how
                if why is not None:
                    return None if self._is_closing else self._loss(why)
            are_ready = self._local.are_ready and all(machine.is_ready for machine in self._remote)
            if are_ready and not self._ready.done():
                self._ready.set_result(None)
            stall_s = STALL.total_seconds()
            if self._waits.longest_s() > stall_s:
                self._failure = RankLost(f"what the ranks do together has not ended within {stall_s:.0f} s")
                return self._loss()

    def _loss(self, why: str = "") -> RankLost:
        """Describe who ended and how. why: where that is known."""
        how = why or self._local.how_ended() or str(self._failure or "a rank has said what none says")
        return RankLost(f"{how}: all {self._settings.size} ranks of the worker end with it")

    def _end(self) -> None:
        self._local.kill()
        for machine in self._remote:
            machine.close()
        self._abandon()
        self._local.end()
        self._end_rendezvous()

    def _abandon(self) -> None:
        for group in (self._control_group, self._device_group):
            if group is not None:
                group.abandon()

    def _end_rendezvous(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._others is not None:
            self._others.store.close()


def host_part(address: str) -> str:
    """Return the host of HOST:PORT."""
    return address.rpartition(":")[0].strip("[]")
