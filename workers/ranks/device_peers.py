"""The workers that share experts with this one, where they compute on devices: their group, and who has ended.

    join: all have loaded ──> a group of devices, which exchange rows ──> watch ──> leave, close
                                                                           └── a worker ends ──> the group is abandoned

A device that waits for one that has ended waits for ever, and the host waits for the device. So a thread watches the
sockets to the others meanwhile: what ends closes them. It watches for how long the host waits, too.
"""

import select
import socket
import threading
from contextlib import AbstractContextManager

from ..common.errors import PeerLost, RankLost
from ..device.device import Device
from ..device.device_group import DeviceGroup
from ..models.layers.row_exchange import RowExchange
from ..parallel.rendezvous import PeerSockets
from ..parallel.stores import STALL
from .data_parallel import join
from .waits import Waits

POLL_S = 1.0


class DevicePeers:
    def __init__(self, peer_sockets: PeerSockets, device: Device, exchange: RowExchange) -> None:
        """exchange: of the layers of this worker; until `join` it is not with the others."""
        self.exchange = exchange
        self._peer_sockets, self._device = peer_sockets, device
        self._group: DeviceGroup | None = None
        self._lost: RankLost | None = None
        self._waits = Waits()
        self._is_abandoned = self._has_left = False
        self._woken, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="diptych-peers", daemon=True)

    def join(self) -> None:
        """Wait until all have come here, however long that takes, and exchange rows from then on. Raises RankLost."""
        self._group = join(self._peer_sockets, self._device.group)
        self.exchange.join(self._group)
        self._thread.start()

    def check(self) -> None:
        """Raise RankLost if a worker was lost, whatever error the device reports for that."""
        if self._lost is not None:
            raise self._lost

    def waiting(self) -> AbstractContextManager[None]:
        """Bound the time for which the code within waits for the others: after STALL they are left."""
        return self._waits.waiting()

    def leave(self) -> None:
        """Let no device wait for the others any more, and end the watch of their sockets. Idempotent."""
        if self._has_left:
            return
        self._has_left = True
        self._waker.send(b"w")
        if self._group is not None:
            self._thread.join()
            self._abandon(self._group)

    def close(self) -> None:
        """Leave; no graph holds calls of the group any more. Idempotent."""
        self.leave()
        if self._group is not None:
            self._group.close()
        self._woken.close()
        self._waker.close()

    def _watch(self) -> None:
        poll, size = select.poll(), self._peer_sockets.group.size
        poll.register(self._woken, select.POLLIN)
        for descriptor in self._peer_sockets.descriptors:
            poll.register(descriptor, 0)  # it may be read elsewhere; that it is hung up is told all the same
        while not (ready := [descriptor for descriptor, _ in poll.poll(POLL_S * 1e3)]):
            stall_s = STALL.total_seconds()
            if self._waits.longest_s() > stall_s:
                what = f"what the {size} workers that share experts compute together has not ended within {stall_s:g} s"
                self._lost = RankLost(f"{what}: all of them end, to be started again")
                break
        if self._woken.fileno() in ready:
            return
        if ready:
            what = f"one of the {size} workers that share experts ended"
            self._lost = PeerLost(f"{what}: all of them end with it, to be started again")
        assert self._group is not None
        self._abandon(self._group)

    def _abandon(self, group: DeviceGroup) -> None:
        """Called by the watch, or when it is over."""
        if not self._is_abandoned:
            self._is_abandoned = True
            group.abandon()
