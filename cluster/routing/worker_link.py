"""Stream to one worker, shared by its requests: sends submits and aborts, receives tokens, loads and block names.

    CONNECTING ──hello fits──> UP ──breaks, silent, malformed──> waits ──> CONNECTING
         └──no hello, another process, another model──> waits ┘              close() ends it in any state

When the stream breaks, every request on it fails at once. Nothing is kept for the next stream: by then the worker has
aborted all. One task reads messages and calls the requests: the tokens of a step cost one await together.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio

from ...proto import worker_pb2, worker_pb2_grpc
from ...workers.common.channel import SendQueue, auth_metadata, join_router_messages, open_channel
from ...workers.common.errors import (
    ConfigError,
    DiptychError,
    InternalError,
    StepFailed,
    WorkerDraining,
    WorkerLost,
    from_wire,
)
from ...workers.common.names import MAX_CHARS
from ...workers.common.prompt_logprobs import PromptLogprobs
from ...workers.common.request import MAX_LOGPROBS
from ...workers.common.timings import SequenceTimings
from ...workers.common.tls import LinkTls, tls_problem
from ...workers.common.wire import FINISH_FROM_PROTO, PROTOCOL_VERSION
from ...workers.core.embedding import Embedding
from ..common.worker_stats import Drafts
from .actions import CountedTokens, WorkerToken
from .fleet import WorkerInfo
from .policy import RoutingConfig
from .recall.recall_queue import RecallQueue
from .token_source import TokenLogprob

LINK_CLOSED = "the router closed the stream"
SILENCE_CHECKS = 4  # checks of a worker in worker_timeout_s

log = logging.getLogger("diptych.router")

if TYPE_CHECKING:  # the class is generic in its stubs only
    Call = grpc.aio.StreamStreamCall[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]


class RequestListener(Protocol):
    """Receiver of the events of one request. Called on the event loop; must not block."""

    def on_prompt_logprobs(self, handle: int, found: PromptLogprobs) -> None: ...
    def on_embedding(self, handle: int, found: Embedding) -> None: ...
    def on_token(self, handle: int, token: WorkerToken) -> None: ...
    def on_handed_off(self, handle: int, num_output_tokens: int, handoff_id: str, counts: CountedTokens) -> None: ...
    def on_failed(self, handle: int, error: DiptychError, *, handoff: bool) -> None: ...


class LinkOwner(Protocol):
    """Owner of a link: the router. A DiptychError of the first three methods ends the stream."""

    def on_hello(self, info: WorkerInfo, hello: worker_pb2.Hello) -> None: ...
    def on_load(self, info: WorkerInfo, load: worker_pb2.LoadReport) -> None: ...
    def on_blocks(self, info: WorkerInfo, events: worker_pb2.BlockEvents) -> None: ...
    def on_up(self, info: WorkerInfo) -> None:
        """Requests may be submitted from now on."""
        ...

    def on_down(self, info: WorkerInfo, reason: str) -> None:
        """The link broke. Called before its requests fail."""
        ...

    def on_draining(self, info: WorkerInfo) -> None:
        """A request was refused because the worker drains. Called before the request fails."""
        ...

    def on_closed(self, info: WorkerInfo) -> None:
        """A request was aborted or forgotten."""
        ...


class WorkerLink:
    """Link to one worker, which reconnects until `close`. Made on a running event loop."""

    def __init__(
        self,
        info: WorkerInfo,
        token: str | None,
        config: RoutingConfig,
        owner: LinkOwner,
        tls: LinkTls | None = None,
    ) -> None:
        self.info = info
        self._token = token
        self._tls = tls
        self._config = config
        self._owner = owner
        self._listeners: dict[int, RequestListener] = {}
        self._outbox = SendQueue(join_router_messages)
        self._recalls = RecallQueue(self._recall)
        self._has_hello = asyncio.Event()
        self._stub: worker_pb2_grpc.WorkerStub | None = None  # of the open channel
        self._vocab_size = 0
        self._answered = 0  # number of the last ping that was answered
        self._knows_draining = False  # has reported to the worker on this stream that it knows of the drain
        self._is_done = False  # has reported to the worker that no request of this router is left there
        self._is_up = False
        self._reason = ""
        self._task = asyncio.create_task(self._run(), name=f"link to {info.address}")

    @property
    def is_idle(self) -> bool:
        return not self._listeners

    def submit(self, submit: worker_pb2.Submit, listener: RequestListener) -> None:
        """Submit a request. Only while the link is up. `listener` gets its events until it is closed."""
        assert self._is_up, "a worker was chosen that is not there"
        self._listeners[submit.handle] = listener
        self._send(worker_pb2.RouterMessage(submit=submit))

    def abort(self, handle: int) -> None:
        """Stop a request. Idempotent."""
        if self._is_up:
            self._send(worker_pb2.RouterMessage(abort=worker_pb2.Abort(handle=handle)))
        self._drop(handle)
        self._owner.on_closed(self.info)

    def offer(self, offer: worker_pb2.Offer) -> None:
        """Offer a running request to another worker. Only while the link is up."""
        self._send(worker_pb2.RouterMessage(offer=offer))

    def offer_prefix(self, offer: worker_pb2.OfferPrefix) -> None:
        """Offer cached KV to another worker. Only while the link is up."""
        self._send(worker_pb2.RouterMessage(offer_prefix=offer))

    def recall(self, name: bytes, timeout_s: float) -> Awaitable[worker_pb2.RecalledAnswer | None]:
        """Ask for what the worker has recorded of an answer. None: it cannot be asked, or does not answer in time."""
        return self._recalls.ask(name, timeout_s)

    async def _recall(self, names: Sequence[bytes], timeout_s: float) -> Sequence[worker_pb2.RecalledAnswer] | None:
        if not self._is_up or self._stub is None:
            return None
        request, metadata = worker_pb2.RecallRequest(names=names), auth_metadata(self._token)
        try:
            found = await self._stub.Recall(request, timeout=timeout_s, metadata=metadata)  # type: ignore[misc]
        except (grpc.aio.AioRpcError, asyncio.CancelledError):  # the latter where its channel is closed
            return None
        return found.answers

    def forget(self, handle: int) -> None:
        """Drop a request that has ended at the worker."""
        self._drop(handle)
        self._owner.on_closed(self.info)

    async def close(self) -> None:
        """Close the stream: the worker aborts what is left. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        delay_s = self._config.reconnect_s
        while True:
            was_up = False
            try:
                was_up = await self._connect()
            except Exception:
                # Top loop of the link: this is a bug of ours; connect again all the same.
                log.exception("the link to %s failed", self.info.address)
            delay_s = self._config.reconnect_s if was_up else min(2 * delay_s, self._config.max_reconnect_s)
            await asyncio.sleep(delay_s)

    async def _connect(self) -> bool:
        """Open one stream and serve it until its end. Returns whether it ever was up."""
        try:
            channel = open_channel(self.info.address, self._tls)
        except ConfigError as e:  # files of TLS that cannot be used now
            self._go_down(e.message)
            return False
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        call = self._stub.Link(metadata=auth_metadata(self._token))
        self._has_hello = asyncio.Event()
        self._knows_draining = self._is_done = False
        tasks = [asyncio.create_task(t) for t in (self._read(call), self._write(call), self._watch())]
        reason = LINK_CLOSED
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = self._reason_of(done)
        finally:
            was_up = self._is_up
            # Cancel the call first: a grpc.aio coroutine that is cancelled while it connects ignores it and goes on.
            call.cancel()
            for task in tasks:
                task.cancel()
            try:
                self._go_down(reason)
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                await channel.close()
        return was_up

    def _reason_of(self, ended: set[asyncio.Task[None]]) -> str:
        """Reason why the stream ended, from the task that ended first."""
        task = ended.pop()
        error = None if task.cancelled() else task.exception()
        match error:
            case None:
                return "the worker ended the stream"
            case grpc.aio.AioRpcError():
                details = error.details() or "no details"
                return tls_problem(details) or f"{error.code().name}: {details}"
            case DiptychError():
                return error.message
            case _:
                log.error("the link to %s failed", self.info.address, exc_info=error)
                return f"the link failed ({type(error).__name__}), see the router's log"

    def _go_down(self, reason: str) -> None:
        """Notify the owner, then fail every request."""
        if reason not in (self._reason, LINK_CLOSED):
            self._reason = reason
            log.warning("no link to worker %s at %s: %s", self.info.incarnation, self.info.address, reason)
        self._is_up = False
        self._outbox.clear()
        self._owner.on_down(self.info, reason)
        error = WorkerLost(f"worker {self.info.incarnation} at {self.info.address} was lost: {reason}")
        listeners, self._listeners = self._listeners, {}
        for handle, listener in listeners.items():
            listener.on_failed(handle, error, handoff=False)

    async def _read(self, call: "Call") -> None:
        first = await call.read()
        if not isinstance(first, worker_pb2.WorkerMessage) or first.WhichOneof("message") != "hello":
            raise WorkerLost("the stream did not begin with a hello")
        self._on_hello(first.hello)
        while isinstance(received := await call.read(), worker_pb2.WorkerMessage):
            if received.HasField("batch"):
                for message in received.batch.messages:
                    self._on_message(message)
            else:
                self._on_message(received)

    def _on_message(self, message: worker_pb2.WorkerMessage) -> None:
        match message.WhichOneof("message"):
            case "pong":
                self._answered = message.pong.number
            case "step":
                self._on_step(message.step)
            case "prompt_logprobs":
                self._on_prompt_logprobs(message.prompt_logprobs)
            case "embedding":
                self._on_embedding(message.embedding)
            case "load":
                self._on_load(message.load)
            case "blocks":
                self._owner.on_blocks(self.info, message.blocks)
            case "failed":
                self._on_failed(message.failed)
            case "handed_off":
                self._on_handed_off(message.handed_off)
            case kind:
                raise InternalError(f"the worker sent an unexpected message ({kind or 'of an unknown kind'})")

    async def _write(self, call: "Call") -> None:
        while (message := await self._outbox.take()) is not None:
            try:
                await call.write(message)
            except asyncio.InvalidStateError as e:
                raise WorkerLost(await _status(call)) from e

    async def _watch(self) -> None:
        """Ping the worker. Raises WorkerLost when it does not answer: it hangs, or one direction is cut. Counts checks,
        not seconds, so that a pause of this whole process is not taken for a worker's silence."""
        try:
            async with asyncio.timeout(self._config.hello_timeout_s):
                await self._has_hello.wait()
        except TimeoutError as e:
            raise WorkerLost(f"no hello within {self._config.hello_timeout_s:g} s") from e
        answered, num_silent, number = -1, 0, 0
        while num_silent < SILENCE_CHECKS:
            num_silent = num_silent + 1 if answered == self._answered else 0
            answered, number = self._answered, number + 1
            self._send(worker_pb2.RouterMessage(ping=worker_pb2.Ping(number=number)))
            await asyncio.sleep(self._config.worker_timeout_s / SILENCE_CHECKS)
        raise WorkerLost(f"it sent nothing for {self._config.worker_timeout_s:g} s")

    def _send(self, message: worker_pb2.RouterMessage) -> None:
        self._outbox.put(message)

    def _on_hello(self, hello: worker_pb2.Hello) -> None:
        if hello.incarnation != self.info.incarnation:
            raise WorkerLost(f"another process answers there (incarnation {hello.incarnation[:MAX_CHARS] or 'none'})")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ConfigError(
                f"the worker uses protocol version {hello.protocol_version}, this router {PROTOCOL_VERSION}: "
                "run the same version of Diptych everywhere"
            )
        self._owner.on_hello(self.info, hello)
        self._vocab_size = hello.model.vocab_size
        self._is_up, self._reason = True, ""
        self._has_hello.set()
        self._owner.on_up(self.info)

    def _on_load(self, load: worker_pb2.LoadReport) -> None:
        self._owner.on_load(self.info, load)
        if load.draining and not self._knows_draining:
            # From now on the owner submits nothing more here; earlier requests are already on the stream.
            self._knows_draining = True
            self._is_done = self.is_idle
            self._send(worker_pb2.RouterMessage(drain_seen=worker_pb2.DrainSeen(is_done=self._is_done)))

    def _drop(self, handle: int) -> RequestListener | None:
        """Remove a request. If it was the last one on a worker that drains, tell the worker so."""
        listener = self._listeners.pop(handle, None)
        if self._is_up and self._knows_draining and self.is_idle and not self._is_done:
            self._is_done = True
            self._send(worker_pb2.RouterMessage(drain_seen=worker_pb2.DrainSeen(is_done=True)))
        return listener

    def _on_step(self, step: worker_pb2.StepEvents) -> None:
        """Pass each token to its request. Raises InternalError for columns that do not fit together."""
        ids, num = step.token_ids, len(step.handles)
        if not num == len(ids) == len(step.positions) == len(step.finish_reasons):
            raise InternalError("the columns of a step have different lengths")
        if not FINISH_FROM_PROTO.keys() >= set(step.finish_reasons):
            raise InternalError(f"a step has an unknown finish reason: {set(step.finish_reasons)}")
        if num and max(ids) >= self._vocab_size:
            raise InternalError(f"a step has token {max(ids)}, outside the vocabulary of {self._vocab_size}")
        logprobs = {p.entry: self._logprob(p, ids[p.entry]) for p in step.logprobs if p.entry < num}
        cached = {c.entry: CountedTokens(c.num_tokens, c.num_stored, c.num_pulled) for c in step.cached}
        timings = {t.entry: SequenceTimings.from_proto(t) for t in step.timings}
        drafts = {v.entry: Drafts.from_proto(v) for v in step.verified} if step.verified else None
        worker = self.info.incarnation
        columns = zip(step.handles, ids, step.positions, step.finish_reasons, strict=True)
        for entry, (handle, token_id, position, reason) in enumerate(columns):
            listener = self._listeners.get(handle)
            if listener is None:
                continue
            finish = FINISH_FROM_PROTO[reason]
            logprob, timing = logprobs.get(entry), timings.get(entry)
            verified = drafts.get(entry) if drafts else None
            token = WorkerToken(position, token_id, finish, logprob, cached.get(entry), timing, verified, worker)
            listener.on_token(handle, token)

    def _logprob(self, message: worker_pb2.TokenLogprobs, token_id: int) -> TokenLogprob:
        ids = message.top_token_ids
        if not len(ids) == len(message.top_logprobs) <= MAX_LOGPROBS:
            raise InternalError(
                f"a token has {len(ids)} most likely ids and {len(message.top_logprobs)} logprobs for them"
            )
        if ids and max(ids) >= self._vocab_size:
            raise InternalError(f"a step has token {max(ids)}, outside the vocabulary of {self._vocab_size}")
        return TokenLogprob(token_id, message.logprob, tuple(zip(ids, message.top_logprobs, strict=True)))

    def _on_prompt_logprobs(self, message: worker_pb2.PromptLogprobs) -> None:
        """Pass them to their request. Raises InternalError for columns that do not fit together."""
        listener = self._listeners.get(message.handle)
        if listener is not None:
            listener.on_prompt_logprobs(message.handle, PromptLogprobs.from_proto(message, self._vocab_size))

    def _on_embedding(self, message: worker_pb2.Embedding) -> None:
        """Pass it to its request. Raises InternalError for numbers that none has."""
        listener = self._listeners.get(message.handle)
        if listener is not None:
            listener.on_embedding(message.handle, Embedding.from_proto(message))

    def _on_failed(self, failed: worker_pb2.RequestFailed) -> None:
        listener = self._drop(failed.handle)
        if listener is not None:
            error = from_wire(failed.error, failed.message)
            error.retryable = failed.retryable
            if isinstance(error, StepFailed):
                error.num_output = failed.num_output_tokens
            if isinstance(error, WorkerDraining):
                self._owner.on_draining(self.info)
            listener.on_failed(failed.handle, error, handoff=failed.handoff)

    def _on_handed_off(self, handed_off: worker_pb2.HandedOff) -> None:
        listener = self._listeners.get(handed_off.handle)
        if listener is not None:
            counts = CountedTokens(handed_off.num_cached, handed_off.num_stored)
            listener.on_handed_off(handed_off.handle, handed_off.num_output_tokens, handed_off.handoff_id, counts)


async def _status(call: "Call") -> str:
    return f"{(await call.code()).name}: {await call.details() or 'no details'}"
