"""The sink's side of hand-offs: pulls of sequences from other workers. One event loop, no torch.

What one pull does is in handoff/pull.py, what it decides in handoff/sink_machine.py; here is what pulls share.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import grpc.aio

from ...proto import kv_pb2_grpc, worker_pb2
from ..common.channel import PeerAccess, auth_metadata, open_channel
from ..common.errors import ChecksumMismatch, DiptychError, RequestAborted, SequenceEnded, Unavailable, WorkerLost
from ..common.timings import TransferCounters, is_name
from ..common.tls import LinkTls
from ..kv.memory import KVMemory
from ..kv.staging import Staging
from ..transport.base import Transport
from .ports import SinkPort
from .pull import Pull, PullContext, PullJob, PullResult
from .segment_receiver import DEFAULT_PULL_SETTINGS, PullSettings

MAX_IDLE_CHANNELS = 16
MAX_PEERS = 256  # sources whose traffic is counted; the longest unused are forgotten
CLOSE_S = 2.0
NO_ACCESS = PeerAccess()


@dataclass(slots=True, eq=False)
class _SharedChannel:
    address: str
    channel: grpc.aio.Channel
    num_users: int = 0


class _ChannelPool:
    """gRPC channels by address. One that failed is not used again: a new pull would wait for its back-off."""

    def __init__(self, tls: LinkTls | None) -> None:
        self._tls = tls
        self._channels: dict[str, _SharedChannel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, address: str) -> _SharedChannel:
        shared = self._channels.pop(address, None) or _SharedChannel(address, open_channel(address, self._tls))
        self._channels[address] = shared  # the most recently used is last
        shared.num_users += 1
        return shared

    def give_back(self, shared: _SharedChannel) -> None:
        shared.num_users -= 1
        if self._channels.get(shared.address) is not shared and shared.num_users == 0:
            self._close_channel(shared)
        idle = [other for other in self._channels.values() if other.num_users == 0]
        for other in idle[: max(len(idle) - MAX_IDLE_CHANNELS, 0)]:
            del self._channels[other.address]
            self._close_channel(other)

    def retire(self, shared: _SharedChannel) -> None:
        """Close it when its last user is done; the next pull opens a new one."""
        if self._channels.get(shared.address) is shared:
            del self._channels[shared.address]

    async def close(self) -> None:
        for shared in self._channels.values():
            self._close_channel(shared)
        self._channels.clear()
        if self._closing:
            await asyncio.wait(self._closing)

    def _close_channel(self, shared: _SharedChannel) -> None:
        task = asyncio.get_running_loop().create_task(shared.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class HandoffSink:
    """Every method runs on the worker's event loop. `access`: what every call to a source carries.
    `staging`: where KV is converted, a region of `transports`; gRPC alone takes any."""

    def __init__(
        self,
        incarnation: str,
        memory: KVMemory,
        transports: Mapping[str, Transport],
        port: SinkPort,
        access: PeerAccess = NO_ACCESS,
        settings: PullSettings = DEFAULT_PULL_SETTINGS,
        staging: Staging | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._context = PullContext(
            memory, transports, port, staging or Staging(), settings, auth_metadata(access.token)
        )
        self.num_checksum_failures = 0
        self._channels = _ChannelPool(access.tls)
        self._traffic: dict[str, TransferCounters] = {}  # by incarnation, the last used at the end
        self._num_pulls = 0
        self._is_closing = False
        self._pulls: dict[asyncio.Task[None], Pull] = {}  # until nothing of theirs is left to clean up

    async def pull(self, sequence_key: str, source: worker_pb2.HandoffSource, timeout_s: float) -> PullResult:
        """Bring a sequence's KV here and commit it, within `timeout_s`.

        Raises a HandoffError (UnknownHandoff, LeaseLost, LayoutMismatch, TransportError), WorkerLost, DeadlineExceeded,
        what `reserve` or `commit` raised, or Unavailable after `close` was called; the blocks are then free or in
        quarantine. Cancelling cleans up likewise.
        """
        if self._is_closing:
            raise Unavailable("the worker is stopping")
        self._num_pulls += 1
        traffic = self._traffic_of(source.incarnation)
        job = PullJob(sequence_key, f"{self._incarnation}/{self._num_pulls}", source, timeout_s, traffic)
        shared = self._channels.take(source.address)
        pull = Pull(self._context, job, kv_pb2_grpc.KVHandoffStub(shared.channel))
        task = asyncio.create_task(pull.run())
        self._pulls[task] = pull
        task.add_done_callback(lambda _: self._pulls.pop(task))
        task.add_done_callback(lambda _: self._channels.give_back(shared))
        try:
            return await asyncio.shield(pull.done)
        except DiptychError as e:
            traffic.num_failed += not isinstance(e, RequestAborted | SequenceEnded)
            self.num_checksum_failures += isinstance(e, ChecksumMismatch)
            if isinstance(e, WorkerLost):
                self._channels.retire(shared)
            raise
        except asyncio.CancelledError:
            pull.give_up(RequestAborted("the request ended while its KV was being transferred"))
            raise

    def transfer_stats(self) -> list[worker_pb2.PeerLink]:
        """Statistics of the transfers from each source, since the start."""
        return [traffic.to_proto(incarnation) for incarnation, traffic in self._traffic.items()]

    def _traffic_of(self, incarnation: str) -> TransferCounters:
        traffic = self._traffic.pop(incarnation, None) or TransferCounters()
        if not is_name(incarnation):  # a router's mistake: the others must not stumble over our reports
            return traffic
        self._traffic[incarnation] = traffic
        if len(self._traffic) > MAX_PEERS:
            del self._traffic[next(iter(self._traffic))]
        return traffic

    async def close(self) -> None:
        """Give up the pulls under way, wait for their cleaning up, and close the channels."""
        self._is_closing = True
        tasks = list(self._pulls)
        for pull in self._pulls.values():
            pull.give_up(Unavailable("the worker is stopping"))
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        await self._channels.close()
