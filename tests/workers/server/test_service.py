"""A worker's gRPC service over the FakeRunner: real sockets, real engine threads, hand-computable tokens."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diptych.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from diptych.workers.common.channel import auth_metadata, each_of, open_channel
from diptych.workers.common.errors import ConfigError, InternalError, PortInUse
from diptych.workers.common.request import Request
from diptych.workers.common.role import Role
from diptych.workers.common.wire import submit_from_request
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.engine.events import StepOutput
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import FakeRunner, fake_output

from ...support.sequences import make_request

TIMEOUT_S = 20.0


@asynccontextmanager
async def worker(step_s: float = 0.0, **config: object) -> AsyncIterator[tuple[WorkerService, str]]:
    settings = {"transports": ("grpc",)} | config
    service = WorkerService(WorkerConfig.of(model="fake", **settings), FakeRunner(step_s=step_s))  # type: ignore[arg-type]
    where = await service.start()
    try:
        yield service, where.address
    finally:
        await service.stop(grace_s=0.0)


class Router:
    """The router's end of one Link."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self._channel = open_channel(address)
        self.stub = worker_pb2_grpc.WorkerStub(self._channel)
        self.call = self.stub.Link(metadata=auth_metadata(token))
        self._unread: deque[worker_pb2.WorkerMessage] = deque()

    async def send(self, **message: object) -> None:
        await self.call.write(worker_pb2.RouterMessage(**message))  # type: ignore[arg-type]

    async def submit(self, handle: int, request: Request, outputs: list[int] | None = None, **handoff: object) -> None:
        submit = submit_from_request(handle, request, outputs or [])
        submit.MergeFrom(worker_pb2.Submit(**handoff))  # type: ignore[arg-type]
        await self.send(submit=submit)

    async def read(self, kind: str) -> worker_pb2.WorkerMessage:
        """The next message of that kind."""
        while (message := await self.next()).WhichOneof("message") != kind:
            pass
        return message

    async def next(self) -> worker_pb2.WorkerMessage:
        while not self._unread:
            received = await self.call.read()
            assert isinstance(received, worker_pb2.WorkerMessage)
            self._unread += each_of(received)
        return self._unread.popleft()

    async def tokens(self, handle: int, until_finished: bool = True) -> list[tuple[int, int]]:
        """(position, token) of one request until its end (or of one step)."""
        found: list[tuple[int, int]] = []
        while True:
            step = (await self.read("step")).step
            mine = [i for i, h in enumerate(step.handles) if h == handle]
            found += [(step.positions[i], step.token_ids[i]) for i in mine]
            if mine and (not until_finished or step.finish_reasons[mine[-1]]):
                return found

    async def state(self) -> worker_pb2.WorkerState:
        return await self.stub.GetState(worker_pb2.GetStateRequest())

    async def idle_state(self) -> worker_pb2.WorkerState:
        """The worker's state once nothing is running, leased or on its way any more."""
        while True:
            state = await self.state()
            load = state.load
            if not (load.num_running or load.num_waiting or load.num_leased_blocks or state.num_open_handoffs):
                return state

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


def assert_clean(state: worker_pb2.WorkerState) -> None:
    assert state.num_unaccounted_blocks == 0
    assert state.load.num_free_blocks == state.load.num_blocks
    assert state.load.num_quarantined_blocks == 0


async def test_says_hello_and_answers_requests() -> None:
    async with worker(role="prefill") as (service, address):
        router = Router(address)
        hello = (await router.read("hello")).hello
        assert hello.incarnation == service.incarnation
        assert hello.role == worker_pb2.ROLE_PREFILL
        assert (hello.model.name, hello.num_blocks, hello.layout.block_size) == ("fake", 256, 4)
        assert (await router.read("blocks")).blocks.cleared
        prompts = {i: [i] * (i + 3) for i in range(1, 9)}
        for handle, prompt in prompts.items():
            await router.submit(handle, make_request(prompt, 6))
        got: dict[int, list[int]] = {handle: [] for handle in prompts}
        num_finished = 0
        while num_finished < len(prompts):
            step = (await router.read("step")).step
            for handle, token, reason in zip(step.handles, step.token_ids, step.finish_reasons, strict=True):
                got[handle].append(token)
                num_finished += reason != inference_pb2.FINISH_REASON_UNSPECIFIED
        assert got == {handle: fake_output(prompt, 6) for handle, prompt in prompts.items()}
        assert_clean(await router.idle_state())
        await router.close()


async def test_reports_its_load_before_its_engine_has_begun() -> None:
    """A router that is faster would take it for full, and a role that is set by that report would be a budget of 0."""
    config = WorkerConfig.of(model="fake", transports=("grpc",))
    service, may_begin = WorkerService(config, FakeRunner()), threading.Event()
    service._engine.post(lambda _: may_begin.wait())
    router = Router((await service.start()).address)
    try:
        load, scheduler = (await router.read("load")).load, config.device_scheduler
        assert load.num_free_blocks == load.num_blocks == 256
        assert load.prefill_budget == scheduler.budget_of(Role(config.role)) > 0
        assert load.step_tokens == scheduler.step_tokens > 0
        assert load.decode_role_tokens == scheduler.decode_role_prefill_tokens > 0
    finally:
        may_begin.set()
        await router.close()
        await service.stop(grace_s=0.0)


async def test_a_new_stream_begins_with_no_older_role_than_the_worker_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role is told by GetState first, and by the next report of a step later."""
    monkeypatch.setattr(WorkerService, "_publish", lambda service, output: None)
    async with worker(role="mixed") as (_, address):
        first = Router(address)
        await first.send(set_prefill_budget=worker_pb2.SetPrefillBudget(num_tokens=0))
        while (await first.state()).load.role != worker_pb2.ROLE_DECODE:
            pass
        second = Router(address)
        assert (await second.read("hello")).hello.role == worker_pb2.ROLE_DECODE
        assert (await second.read("load")).load.role == worker_pb2.ROLE_DECODE
        await first.close()
        await second.close()


async def test_tells_which_blocks_it_holds() -> None:
    async with worker() as (_, address):
        first = Router(address)
        await first.submit(1, make_request(list(range(1, 12)), 3))
        assert len((await first.read("blocks")).blocks.stored) == 0
        stored = list((await first.read("blocks")).blocks.stored)
        second = Router(address)
        snapshot = (await second.read("blocks")).blocks
        assert snapshot.cleared
        assert set(snapshot.stored) >= set(stored)
        assert stored
        await first.close()
        await second.close()


async def test_bad_requests_and_draining_are_told_by_name() -> None:
    async with worker() as (_, address):
        router = Router(address)
        await router.submit(1, make_request([], 3))
        failed = (await router.read("failed")).failed
        assert (failed.handle, failed.error, failed.retryable) == (1, "InvalidRequest", False)
        await router.send(drain=worker_pb2.Drain())
        await router.submit(2, make_request([1], 3))
        failed = (await router.read("failed")).failed
        assert (failed.handle, failed.error, failed.retryable) == (2, "WorkerDraining", True)
        await router.close()


async def test_a_drain_refuses_nothing_from_a_router_that_has_not_heard_of_it() -> None:
    """What such a router sends is served. The worker can be drained for good once it says that it knows, and then that
    it has heard the end of all that it sent."""
    async with worker() as (_, address):
        router, supervisor = Router(address), Router(address)
        await router.read("load")
        await supervisor.send(drain=worker_pb2.Drain())
        while not (await router.read("load")).load.draining:
            pass
        assert (await router.idle_state()).num_unfinished_links == 1
        await router.submit(1, make_request([1, 2], 3))
        assert [token for _, token in await router.tokens(1)] == fake_output([1, 2], 3)
        await router.send(drain_seen=worker_pb2.DrainSeen())
        await router.submit(2, make_request([1], 3))
        failed = (await router.read("failed")).failed
        assert (failed.handle, failed.error) == (2, "WorkerDraining")
        assert (await router.idle_state()).num_unfinished_links == 1
        await router.send(drain_seen=worker_pb2.DrainSeen(is_done=True))
        await router.submit(3, make_request([1], 3))
        await router.read("failed")
        assert (await router.idle_state()).num_unfinished_links == 0
        await router.close()
        await supervisor.close()


async def test_a_drained_worker_takes_nothing_new() -> None:
    """Its supervisor has been told that it may be ended: a router that dials now, and has not heard of the drain, must
    go elsewhere at once."""
    async with worker() as (service, address):
        supervisor = Router(address)
        await supervisor.send(drain=worker_pb2.Drain())
        while not (await supervisor.read("load")).load.draining:
            pass
        assert (await supervisor.state()).drained
        router = Router(address)
        await router.submit(1, make_request([1, 2], 3))
        failed = (await router.read("failed")).failed
        assert (failed.error, failed.retryable) == ("WorkerDraining", True)
        assert service._drain.num_unfinished_links == 1
        assert (await supervisor.state()).drained
        await router.close()
        await supervisor.close()


async def test_a_worker_is_not_drained_by_books_older_than_the_last_message_of_a_router() -> None:
    """The router offers a prefix and says that it is done after the engine has been asked for its books, and before it
    has answered: the offer is not in them."""
    async with worker() as (service, address):
        router, may_answer = Router(address), threading.Event()
        await router.submit(1, make_request(list(range(1, 12)), 3))
        await router.tokens(1)
        await router.send(drain=worker_pb2.Drain())
        while not (await router.read("load")).load.draining:
            pass
        await router.send(drain_seen=worker_pb2.DrainSeen())
        await router.send(ping=worker_pb2.Ping(number=1))
        await router.read("pong")
        service._engine.post(lambda engine: may_answer.wait(TIMEOUT_S))
        asked = asyncio.create_task(service.GetState(worker_pb2.GetStateRequest(), None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        offer = worker_pb2.OfferPrefix(handoff_id="prefix", token_ids=list(range(1, 9)))
        await router.send(offer_prefix=offer)
        await router.send(drain_seen=worker_pb2.DrainSeen(is_done=True))
        await router.send(ping=worker_pb2.Ping(number=2))
        await router.read("pong")
        may_answer.set()
        first = await asked
        later = await service.GetState(worker_pb2.GetStateRequest(), None)  # type: ignore[arg-type]
        assert (first.num_open_handoffs, first.num_unfinished_links) == (0, 1)
        assert (later.num_open_handoffs, later.num_unfinished_links) == (1, 0)
        await router.close()


async def test_abort_and_a_broken_link_free_the_blocks() -> None:
    async with worker(step_s=0.002) as (_, address):
        first, second = Router(address), Router(address)
        for handle in (1, 2):
            await first.submit(handle, make_request([5] * 9, 400, ignore_eos=True))
            await first.tokens(handle, until_finished=False)
        await first.send(abort=worker_pb2.Abort(handle=1))
        await first.tokens(2, until_finished=False)
        await first.close()
        assert_clean(await second.idle_state())
        await second.close()


async def test_an_abort_right_behind_its_submit_leaves_nothing_behind() -> None:
    """Both may be read in one go, before the pull's task has begun."""
    async with worker(role="decode") as (service, address):
        link = service._links.open()  # pyright: ignore[reportPrivateUsage]
        submit = submit_from_request(1, make_request([5] * 9, 4), [])
        submit.source.handoff_id, submit.source.address = "secret", address
        service._submit(link, submit)  # pyright: ignore[reportPrivateUsage]
        service._abort(link, link.key(1))  # pyright: ignore[reportPrivateUsage]
        router = Router(address)
        assert_clean(await router.idle_state())
        await router.close()


async def test_hand_off_between_two_workers() -> None:
    async with worker(role="prefill", chunk_tokens=7) as (source, source_at), worker(role="decode") as (_, sink_at):
        prefill, decode = Router(source_at), Router(sink_at)
        for handle, resumed in ((1, 0), (2, 0), (3, 2)):
            prompt = [handle] * 30
            expected = list(enumerate(fake_output(prompt, 10)))
            handoff_id = f"secret-{handle}"
            outputs = [t for _, t in expected[:resumed]]
            request = make_request(prompt, 10)
            where = worker_pb2.HandoffSource(handoff_id=handoff_id, address=source_at, incarnation=source.incarnation)
            await decode.submit(handle, request, outputs, source=where)
            await prefill.submit(handle, request, outputs, offer=worker_pb2.HandoffOffer(handoff_id=handoff_id))
            assert await prefill.tokens(handle, until_finished=False) == [expected[resumed]]
            assert await decode.tokens(handle) == expected[resumed + 1 :]
        source_state, sink_state = await prefill.idle_state(), await decode.idle_state()
        assert_clean(source_state)
        assert_clean(sink_state)
        assert (source_state.load.num_handoffs_sent, sink_state.load.num_handoffs_received) == (3, 3)
        assert sink_state.load.handoff_bytes > 0
        await prefill.close()
        await decode.close()


async def test_a_hand_off_tells_where_its_time_went() -> None:
    async with worker(role="prefill") as (source, source_at), worker(role="decode") as (_, sink_at):
        prefill, decode = Router(source_at), Router(sink_at)
        offer = worker_pb2.HandoffOffer(handoff_id="h")
        where = worker_pb2.HandoffSource(handoff_id="h", address=source_at, incarnation=source.incarnation)
        await decode.submit(1, make_request([1] * 30, 3), source=where)
        await prefill.submit(1, make_request([1] * 30, 3), offer=offer)
        first = (await prefill.read("step")).step
        second = (await decode.read("step")).step
        third = (await decode.read("step")).step
        (of_first,), (of_second,) = first.timings, second.timings
        assert not third.timings
        assert of_first.entry == of_second.entry == 0
        assert of_first.queue_s >= 0 and of_first.compute_s > 0 and not of_first.HasField("handoff")
        handoff = of_second.handoff
        assert (handoff.num_bytes, handoff.transport) == (8 * FakeRunner().layout.block_bytes, "grpc")
        assert handoff.pull_s > 0 and handoff.last_segment_s >= 0 and handoff.release_s > 0
        (link,) = (await decode.idle_state()).load.links
        assert (link.incarnation, link.transport, link.num_failed) == (source.incarnation, "grpc", 0)
        assert (link.num_bytes, link.num_reads) == (handoff.num_bytes, 1)
        (told,) = (await decode.read("load")).load.links
        assert told.incarnation == source.incarnation
        await prefill.close()
        await decode.close()


async def test_a_source_that_does_not_exist_is_a_typed_retryable_failure() -> None:
    async with worker() as (_, address):
        router = Router(address)
        where = worker_pb2.HandoffSource(handoff_id="x", address="127.0.0.1:1", incarnation="nobody")
        await router.submit(1, make_request([1] * 9, 5), source=where)
        failed = (await router.read("failed")).failed
        assert (failed.handle, failed.retryable, failed.handoff) == (1, True, True)
        assert_clean(await router.idle_state())
        await router.close()


async def test_aborting_either_side_of_a_handoff_leaves_nothing_behind() -> None:
    async with worker(step_s=0.005, chunk_tokens=4) as (source, source_at), worker() as (_, sink_at):
        prefill, decode = Router(source_at), Router(sink_at)
        for handle, victim in ((1, prefill), (2, decode)):
            request = make_request([handle] * 200, 50)
            where = worker_pb2.HandoffSource(handoff_id=f"h{handle}", address=source_at, incarnation=source.incarnation)
            await decode.submit(handle, request, source=where)
            await prefill.submit(handle, request, offer=worker_pb2.HandoffOffer(handoff_id=f"h{handle}"))
            await prefill.read("blocks")
            await victim.send(abort=worker_pb2.Abort(handle=handle))
            if victim is decode:
                await prefill.send(abort=worker_pb2.Abort(handle=handle))
            else:
                assert (await decode.read("failed")).failed.handoff
            assert_clean(await prefill.idle_state())
            assert_clean(await decode.idle_state())
        await prefill.close()
        await decode.close()


async def test_a_worker_whose_engine_breaks_ends() -> None:
    async with worker() as (service, _):
        serving = asyncio.create_task(service.run(asyncio.Event()))
        await asyncio.sleep(0)
        service._engine.post(lambda _: {}["no such key"])  # type: ignore[index]
        with pytest.raises(InternalError, match="KeyError"):
            await serving


async def test_transports_hear_when_the_engine_begins_to_compute_and_when_it_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not at every step; what comes while a step runs says nothing of it."""
    async with worker() as (service, _):
        told: list[bool] = []
        for transport in service._transports.values():
            monkeypatch.setattr(transport, "share_memory", told.append)
        num = len(service._transports)
        load = worker_pb2.LoadReport()
        for output in (
            StepOutput(1, ran=True),
            StepOutput(2, ran=True, load=load),
            StepOutput(2),  # while a step runs
            StepOutput(3, ran=True),
            StepOutput(4, load=load),
            StepOutput(4),
            StepOutput(5, ran=True),
        ):
            service._publish(output)
        assert num and told == [True] * num + [False] * num + [True] * num


def test_an_engine_whose_loop_was_closed_says_nothing() -> None:
    """Its thread may still step while the process ends; a traceback there would hide why."""

    async def make() -> WorkerService:
        return WorkerService(WorkerConfig.of(model="fake"), FakeRunner())

    service, service._loop = asyncio.run(make()), asyncio.new_event_loop()
    service._broken = service._loop.create_future()
    service._loop.close()
    service._on_step(StepOutput(1))
    service.end_with(InternalError("the engine's fault"))
    assert not service._broken.done()


async def test_the_token_guards_everything_but_health() -> None:
    async with worker(auth_token="secret") as (_, address):
        for token, allowed in (("secret", True), ("wrong", False), (None, False)):
            async with open_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(service="diptych.v1.Worker"))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                metadata, stub = auth_metadata(token), worker_pb2_grpc.WorkerStub(channel)
                state = stub.GetState(worker_pb2.GetStateRequest(), metadata=metadata)
                link = stub.Link(metadata=metadata)
                if allowed:
                    await state
                    assert (await link.read()).WhichOneof("message") == "hello"
                    link.cancel()
                    continue
                for call in (state, link.read()):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_reflection_lists_the_services() -> None:
    async with worker() as (_, address), open_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        names = {s.name for s in answer.list_services_response.service}
        assert {"diptych.v1.Worker", "diptych.v1.KVHandoff", "grpc.health.v1.Health"} <= names


async def test_bad_settings_and_ports_are_named() -> None:
    with pytest.raises(ConfigError, match="needs an auth_token"):
        async with worker(host="0.0.0.0"):
            pass
    async with worker() as (_, address):
        with pytest.raises(PortInUse, match="Choose another port"):
            async with worker(port=int(address.rpartition(":")[2])):
                pass
