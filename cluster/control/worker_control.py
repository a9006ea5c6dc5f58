"""The supervisor's own stream to one worker: it hears the worker's load, changes its prefill
budget, drains it.

It submits nothing, so it may come and go without touching a request. Death is not noticed here: Ray tells it sooner.
"""

import asyncio
import logging
from typing import Any, Self

import grpc
import grpc.aio

from ...proto import worker_pb2, worker_pb2_grpc
from ...workers.common.channel import auth_metadata, each_of, open_channel
from ...workers.common.errors import ConfigError, DiptychError, InternalError, WorkerLost
from ...workers.common.role import Role, budget_of
from ...workers.common.tls import LinkTls, lost_peer, tls_problem
from ..common.expert_loads import check_counts
from ..common.plurals import count
from ..common.worker_stats import TransferStats, check_drafts, read_transfer_stats

REPLY_S = 5.0
REPORT_S = 60.0  # of a worker that has just started, on cores that all who start share
RECONNECT_S = 0.5

log = logging.getLogger("diptych.supervisor")


class WorkerControl:
    """Made by `open`; `close` it. `load` is the newest report, `num_received` counts all messages."""

    def __init__(self, address: str, token: str | None, tls: LinkTls | None = None) -> None:
        self.address = address
        self.load = worker_pb2.LoadReport()
        self.transfer_stats: tuple[TransferStats, ...] = ()  # of that report
        self.num_received = 0
        self._metadata = auth_metadata(token)
        self._tls = tls
        self._dial()
        self._outbox: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue()
        self._is_known = asyncio.Event()
        self._is_closed = False
        self._knows_draining = False  # and has reported it on this stream
        self._call: Any = None
        self._task = asyncio.create_task(self._run())

    def _dial(self) -> None:
        self._channel = open_channel(self.address, self._tls)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)

    async def _redial(self) -> None:
        """Connect with the certificate that the files hold now."""
        before = self._channel
        try:
            self._dial()
        except ConfigError as e:
            log.warning("%s. The certificate that was read before stays in use", e.message)
        else:
            await before.close(REPLY_S)

    @classmethod
    async def open(cls, address: str, token: str | None, tls: LinkTls | None = None) -> Self:
        """Connect, and wait for the first report, which tells whether the worker drains. Raises WorkerLost if none
        comes in time."""
        control = cls(address, token, tls)
        try:
            async with asyncio.timeout(REPORT_S):
                await control._is_known.wait()
        except BaseException as e:
            await control.close()
            if isinstance(e, TimeoutError):
                raise WorkerLost(f"the worker at {address} sent no report within {REPORT_S:g} s") from e
            raise
        return control

    @property
    def num_requests(self) -> int:
        return self.load.num_running + self.load.num_waiting

    def budget_of(self, role: Role) -> int:
        """Prefill budget of the worker in that role."""
        return budget_of(role, self.load.step_tokens, self.load.decode_role_tokens)

    def set_prefill_budget(self, num_tokens: int) -> None:
        """Let the worker's steps compute so many prompt tokens beside decodes. Its reports say when they do."""
        budget = worker_pb2.SetPrefillBudget(num_tokens=num_tokens)
        self._outbox.put_nowait(worker_pb2.RouterMessage(set_prefill_budget=budget))

    async def drain(self) -> None:
        await self._outbox.put(worker_pb2.RouterMessage(drain=worker_pb2.Drain()))

    async def state(self) -> worker_pb2.WorkerState:
        """Has the worker compare its books first. Raises InternalError if they are wrong, WorkerLost."""
        try:
            request = worker_pb2.GetStateRequest()
            return await self._stub.GetState(request, timeout=REPLY_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.INTERNAL:
                raise InternalError(f"the worker at {self.address}: {e.details()}") from e
            details = f"{e.code().name}: {e.details()}"
            raise lost_peer(f"the worker at {self.address} did not report its state", details) from e
        except grpc.aio.UsageError as e:
            raise WorkerLost(f"the worker at {self.address} did not report its state: {e}") from e  # `close` was called

    async def audit(self) -> str:
        """Return what is wrong with the worker's block bookkeeping; empty text where nothing is."""
        try:
            num = (await self.state()).num_unaccounted_blocks
        except DiptychError as e:
            return e.message
        return f"{count(num, 'KV block')} held by nobody, or twice: a bug, please report it" if num else ""

    async def is_drained(self) -> bool:
        """Drains and has nothing left: computes nothing, holds no KV for others, and every router has heard all that it
        waited for. One that says so takes nothing new. Raises InternalError, WorkerLost."""
        return (await self.state()).drained

    async def close(self) -> None:
        """Idempotent."""
        self._is_closed = True
        # Cancel the call first: a grpc.aio coroutine that is cancelled while it connects ignores that and continues.
        if self._call is not None:
            self._call.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def _run(self) -> None:
        """Open one stream after another."""
        problem: str | None = None  # with TLS, that is logged once
        while not self._is_closed:
            call = self._call = self._stub.Link(metadata=self._metadata)
            self._knows_draining, must_redial = False, False
            writer = asyncio.create_task(self._write(call))
            try:
                await self._read(call)
            except grpc.aio.AioRpcError as e:
                if (why := tls_problem(e.details() or "")) not in (None, problem):
                    log.warning("no link to the worker at %s: %s", self.address, why)
                problem = why
                log.info("lost the stream to %s: %s", self.address, e.code().name)
                must_redial = self._tls is not None
            finally:
                call.cancel()
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            await asyncio.sleep(RECONNECT_S)
            if must_redial:
                await self._redial()

    async def _read(self, call: Any) -> None:
        while isinstance(received := await call.read(), worker_pb2.WorkerMessage):
            self.num_received += 1
            for message in each_of(received):
                if message.HasField("load"):
                    self._on_load(message.load)
                    self._is_known.set()

    def _on_load(self, load: worker_pb2.LoadReport) -> None:
        try:
            check_counts(load)
            check_drafts(load)
            self.transfer_stats = read_transfer_stats(load)
        except InternalError as e:
            log.warning("a report of %s is dropped: %s", self.address, e.message)
            return
        if load.draining and not self._knows_draining:
            self._knows_draining = True
            self._outbox.put_nowait(worker_pb2.RouterMessage(drain_seen=worker_pb2.DrainSeen(is_done=True)))
        self.load = load

    async def _write(self, call: Any) -> None:
        while True:
            await call.write(await self._outbox.get())
