"""One link against a scripted worker on a real socket."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diptych.cluster.routing.actions import CountedTokens, WorkerToken
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.token_source import TokenLogprob
from diptych.cluster.routing.worker_link import WorkerLink
from diptych.proto import worker_pb2
from diptych.workers.common.errors import ConfigError, DiptychError, InternalError, OutOfBlocks, WorkerLost
from diptych.workers.common.prompt_logprobs import PromptLogprobs
from diptych.workers.common.request import FinishReason
from diptych.workers.common.timings import SequenceTimings
from diptych.workers.core.embedding import Embedding

from ...support.scripted_worker import ScriptedWorker, scripted

CONFIG = RoutingConfig(reconnect_s=0.01, max_reconnect_s=0.02)


class Listener:
    """Owner and request in one; `heard` holds the received messages in order."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.refusal: DiptychError | None = None
        self.num_closed = 0  # requests that were aborted or forgotten

    def on_hello(self, info: WorkerInfo, hello: worker_pb2.Hello) -> None:
        if self.refusal is not None:
            raise self.refusal

    def on_up(self, info: WorkerInfo) -> None:
        self.heard.put_nowait(("up",))

    def on_load(self, info: WorkerInfo, load: worker_pb2.LoadReport) -> None:
        self.heard.put_nowait(("load", load.num_running))

    def on_blocks(self, info: WorkerInfo, events: worker_pb2.BlockEvents) -> None:
        self.heard.put_nowait(("blocks", list(events.stored)))

    def on_down(self, info: WorkerInfo, reason: str) -> None:
        self.heard.put_nowait(("down", reason))

    def on_draining(self, info: WorkerInfo) -> None:
        self.heard.put_nowait(("draining",))

    def on_closed(self, info: WorkerInfo) -> None:
        self.num_closed += 1

    def on_token(self, handle: int, token: WorkerToken) -> None:
        self.heard.put_nowait(("token", handle, token))

    def on_prompt_logprobs(self, handle: int, found: PromptLogprobs) -> None:
        self.heard.put_nowait(("prompt logprobs", handle, found))

    def on_embedding(self, handle: int, found: Embedding) -> None:
        self.heard.put_nowait(("embedding", handle, found))

    def on_handed_off(self, handle: int, num_output_tokens: int, handoff_id: str, counts: CountedTokens) -> None:
        self.heard.put_nowait(("handed off", handle, num_output_tokens, handoff_id, counts))

    def on_failed(self, handle: int, error: DiptychError, *, handoff: bool) -> None:
        self.heard.put_nowait(("failed", handle, error, handoff))

    async def hears(self, kind: str) -> tuple[Any, ...]:
        """The next thing heard, which must be of that kind."""
        event = await self.heard.get()
        assert event[0] == kind, event
        return event[1:]

    async def hears_at_last(self, kind: str) -> tuple[Any, ...]:
        while True:
            event = await self.heard.get()
            if event[0] == kind:
                return event[1:]


async def connected(
    worker: ScriptedWorker, config: RoutingConfig = CONFIG, token: str | None = None
) -> tuple[WorkerLink, Listener]:
    listener = Listener()
    link = WorkerLink(worker.info, token, config, listener)
    await listener.hears("up")
    return link, listener


async def test_tokens_failures_loads_and_blocks_find_their_listener() -> None:
    async with scripted("mixed", token="secret") as (worker,):
        link, listener = await connected(worker, token="secret")
        other = Listener()
        link.submit(worker_pb2.Submit(handle=1), listener)
        link.submit(worker_pb2.Submit(handle=2), other)
        assert [(await worker.submitted()).handle for _ in range(2)] == [1, 2]
        step = worker_pb2.StepEvents(
            handles=[1, 2, 9, 1],
            token_ids=[5, 6, 7, 8],
            positions=[0, 3, 0, 1],
            finish_reasons=[0, 0, 0, 2],
            logprobs=[worker_pb2.TokenLogprobs(entry=1, logprob=-1.5, top_token_ids=[6], top_logprobs=[-1.5])],
            cached=[worker_pb2.CachedTokens(entry=0, num_tokens=4, num_stored=8, num_pulled=2)],
            timings=[SequenceTimings(0.5, 2).to_proto(3)],
        )
        worker.send(step=step)
        name = worker.incarnation
        assert await listener.hears("token") == (1, WorkerToken(0, 5, None, None, CountedTokens(4, 8, 2), worker=name))
        assert await listener.hears("token") == (
            1,
            WorkerToken(1, 8, FinishReason.LENGTH, timings=SequenceTimings(0.5, 2), worker=name),
        )
        logprob = TokenLogprob(6, -1.5, ((6, -1.5),))
        assert await other.hears("token") == (2, WorkerToken(3, 6, None, logprob, worker=name))
        worker.load(num_running=3)
        assert await listener.hears("load") == (3,)
        worker.send(blocks=worker_pb2.BlockEvents(stored=[b"name"]))
        assert await listener.hears("blocks") == ([b"name"],)
        worker.fail(2, OutOfBlocks("full"), handoff=True)
        handle, error, handoff = await other.hears("failed")
        assert (handle, type(error), error.message, error.retryable, handoff) == (
            2,
            OutOfBlocks,
            "full",
            True,
            True,
        )
        worker.fail(2, OutOfBlocks("again"))
        link.forget(1)
        assert link.is_idle
        worker.tokens(1, [1], start=2)
        worker.load()
        assert await listener.hears("load") == (0,)
        assert other.heard.empty()
        await link.close()
        assert await worker.ended.get() == 1


async def test_an_abort_reaches_the_worker_and_silences_the_request() -> None:
    async with scripted("mixed") as (worker,):
        link, listener = await connected(worker)
        link.submit(worker_pb2.Submit(handle=1), listener)
        link.abort(1)
        assert (await worker.submitted()).handle == 1
        assert await worker.aborted() == 1
        worker.tokens(1, [5])
        worker.load()
        await listener.hears("load")
        await link.close()
        link.abort(2)  # there is no request to inform


@pytest.mark.parametrize("how", ["kill", "end"])
async def test_a_broken_stream_is_told_to_all_and_dialled_again(how: str) -> None:
    async with scripted("mixed") as (worker,):
        link, listener = await connected(worker)
        for handle in (1, 2):
            link.submit(worker_pb2.Submit(handle=handle), listener)
            await worker.submitted()
        if how == "kill":
            await worker.kill()
        else:
            worker.end_stream()
        await listener.hears("down")
        for handle in (1, 2):
            lost, error, handoff = await listener.hears("failed")
            assert (lost, type(error), handoff) == (handle, WorkerLost, False)
            assert worker.incarnation in error.message
        assert link.is_idle
        if how == "kill":
            await worker.start(worker.port)
        await listener.hears_at_last("up")
        link.submit(worker_pb2.Submit(handle=3), listener)
        assert (await worker.submitted()).handle == 3
        await link.close()


async def test_a_worker_that_does_not_answer_is_lost_even_if_it_speaks() -> None:
    """The worker answers for a while. Then its messages are lost, or it receives nothing and continues to report."""
    config = replace(CONFIG, worker_timeout_s=1.5)
    async with scripted("mixed") as (worker,):
        link, listener = await connected(worker, config)
        link.submit(worker_pb2.Submit(handle=1), listener)
        for _ in range(20):
            await asyncio.sleep(0.1)
            worker.load()
            await listener.hears("load")
        worker.answers_pings = False
        worker.load()
        await listener.hears("load")
        assert (await listener.hears("down")) == ("it sent nothing for 1.5 s",)
        assert isinstance((await listener.hears("failed"))[1], WorkerLost)
        await link.close()


def _other_incarnation(hello: worker_pb2.Hello) -> None:
    hello.incarnation = "somebody else"


def _other_version(hello: worker_pb2.Hello) -> None:
    hello.protocol_version = 99


@pytest.mark.parametrize(
    ("change", "reason"), [(_other_incarnation, "another process answers"), (_other_version, "protocol version 99")]
)
async def test_who_is_not_the_worker_is_not_taken_for_it(
    change: Callable[[worker_pb2.Hello], None], reason: str
) -> None:
    async with scripted("mixed") as (worker,):
        assert worker.hello is not None
        change(worker.hello)
        listener = Listener()
        link = WorkerLink(worker.info, None, CONFIG, listener)
        for _ in range(2):
            assert reason in (await listener.hears("down"))[0]
        await link.close()


async def test_a_worker_that_its_owner_refuses_stays_down() -> None:
    async with scripted("mixed") as (worker,):
        listener = Listener()
        listener.refusal = ConfigError("another model")
        link = WorkerLink(worker.info, None, CONFIG, listener)
        for _ in range(2):
            assert (await listener.hears("down")) == ("another model",)
        listener.refusal = None
        await listener.hears_at_last("up")
        await link.close()


async def test_no_hello_and_no_token() -> None:
    async with scripted("mixed") as (silent,), scripted("mixed", token="secret") as (guarded,):
        silent.hello = None
        hasty = replace(CONFIG, hello_timeout_s=0.05)
        for worker, config, reason in (
            (silent, hasty, "no hello within 0.05 s"),
            (guarded, CONFIG, "UNAUTHENTICATED"),
        ):
            listener = Listener()
            link = WorkerLink(worker.info, None, config, listener)
            assert reason in (await listener.hears("down"))[0]
            await link.close()


async def test_nobody_there() -> None:
    listener = Listener()
    link = WorkerLink(WorkerInfo("w", "127.0.0.1:1", "mixed", "mixed"), None, CONFIG, listener)
    for _ in range(3):
        assert "UNAVAILABLE" in (await listener.hears("down"))[0]
    await link.close()


Step = worker_pb2.StepEvents


def _step_with_top(ids: list[int], logprobs: list[float]) -> dict[str, worker_pb2.StepEvents]:
    told = worker_pb2.TokenLogprobs(entry=0, top_token_ids=ids, top_logprobs=logprobs)
    return {"step": Step(handles=[1], token_ids=[1], positions=[0], finish_reasons=[0], logprobs=[told])}


BAD_MESSAGES = {
    "different lengths": {"step": Step(handles=[1], token_ids=[1, 2], positions=[0], finish_reasons=[0])},
    "outside the vocabulary": {"step": Step(handles=[1], token_ids=[1000], positions=[0], finish_reasons=[0])},
    "unknown finish reason": {"step": Step(handles=[1], token_ids=[1], positions=[0], finish_reasons=[7])},
    "1 most likely ids and 0 logprobs": _step_with_top([1], []),
    "21 most likely ids and 21 logprobs": _step_with_top([1] * 21, [-1.0] * 21),
    "token 1000, outside": _step_with_top([1000], [-1.0]),
    "finite and not negative": {
        "step": Step(
            handles=[1],
            token_ids=[1],
            positions=[0],
            finish_reasons=[0],
            timings=[worker_pb2.SequenceTimings(entry=0, queue_s=-1)],
        )
    },
    "accepted 2 of 1 drafted": {
        "step": Step(
            handles=[1],
            token_ids=[1],
            positions=[0],
            finish_reasons=[0],
            verified=[worker_pb2.Verified(entry=0, num_drafted=1, num_accepted=2)],
        )
    },
    "unexpected message \\(hello\\)": {"hello": worker_pb2.Hello()},
    "unexpected message \\(of an unknown kind\\)": {},
}


async def test_offers_go_down_and_hand_offs_come_up_in_order_with_tokens() -> None:
    async with scripted("mixed") as (worker,):
        link, listener = await connected(worker)
        link.submit(worker_pb2.Submit(handle=1), listener)
        link.offer(worker_pb2.Offer(handle=1, handoff_id="secret"))
        link.offer_prefix(worker_pb2.OfferPrefix(handoff_id="other", token_ids=[1, 2]))
        assert (await worker.submitted()).handle == 1
        assert (await worker.received.get()).offer.handoff_id == "secret"
        assert (await worker.received.get()).offer_prefix.token_ids == [1, 2]
        worker.tokens(1, [50])
        worker.send(
            handed_off=worker_pb2.HandedOff(
                handle=1, num_output_tokens=1, handoff_id="secret", num_cached=4, num_stored=8
            )
        )
        worker.send(handed_off=worker_pb2.HandedOff(handle=2, num_output_tokens=9))
        await listener.hears("token")
        assert await listener.hears("handed off") == (1, 1, "secret", CountedTokens(4, 8))
        await link.close()


@pytest.mark.parametrize("reason", BAD_MESSAGES)
async def test_nonsense_ends_the_stream_and_loses_no_request(reason: str) -> None:
    async with scripted("mixed") as (worker,):
        link, listener = await connected(worker)
        link.submit(worker_pb2.Submit(handle=1), listener)
        worker.send(**BAD_MESSAGES[reason])
        await listener.hears("down")
        _, error, _ = await listener.hears("failed")
        with pytest.raises(WorkerLost, match=reason):
            raise error
        await link.close()


async def test_a_bug_in_a_handler_costs_the_stream_and_not_the_router() -> None:
    async with scripted("mixed") as (worker,):
        link, listener = await connected(worker)

        def fail(info: WorkerInfo, load: worker_pb2.LoadReport) -> None:
            raise InternalError("a bug") if load.num_running else ZeroDivisionError("a bug")

        listener.on_load = fail  # type: ignore[method-assign]
        worker.load()
        assert "see the router's log" in (await listener.hears("down"))[0]
        await listener.hears_at_last("up")
        worker.load(num_running=1)
        assert (await listener.hears("down")) == ("a bug",)
        await link.close()


async def test_hanging_up_works_at_any_moment() -> None:
    """Also in the iteration in which a connection attempt fails: a cancelled grpc.aio coroutine then continues."""
    async with scripted("mixed") as (worker,):
        nobody = WorkerInfo("w", "127.0.0.1:1", "mixed", "mixed")

        async def hang_up_after(info: WorkerInfo, num_turns: int) -> None:
            link = WorkerLink(info, None, replace(CONFIG, reconnect_s=0.001), Listener())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await link.close()

        for info in (nobody, worker.info):
            await asyncio.gather(*(hang_up_after(info, num_turns) for num_turns in range(400)))
