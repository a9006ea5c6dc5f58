"""Who holds the token sends ids and names without end: they are refused where they are received, and kept nowhere."""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from diptych.proto import kv_pb2, kv_pb2_grpc, worker_pb2
from diptych.workers.common.channel import open_channel
from diptych.workers.common.names import MAX_CHARS
from diptych.workers.testing.fake_runner import fake_output

from ..support.handoff_pair import TIMEOUT_S, serve
from ..support.sequences import make_request
from ..workers.server.test_service import Router, worker

LONG = "x" * (1 << 20)
TOO_LONG = f"has 1,048,576 characters; at most {MAX_CHARS}"
TRUE = worker_pb2.HandoffSource(handoff_id="h", address="127.0.0.1:1", incarnation="i")


def with_source(part: str, name: str) -> dict[str, worker_pb2.HandoffSource]:
    source = worker_pb2.HandoffSource()
    source.CopyFrom(TRUE)
    setattr(source, name, LONG)
    return {part: source}


@pytest.mark.parametrize(
    "names",
    [
        {"request_id": LONG},
        {"offer": worker_pb2.HandoffOffer(handoff_id=LONG)},
        *(
            with_source(part, name)
            for part in ("source", "prefix")
            for name in ("handoff_id", "address", "incarnation")
        ),
    ],
    ids=["request_id", "offer", *(f"{part}.{name}" for part in ("source", "prefix") for name in ("id", "at", "who"))],
)
async def test_a_router_that_submits_a_long_name_is_refused_by_name(names: dict[str, Any]) -> None:
    async with worker() as (_, address):
        router = Router(address)
        await router.submit(1, make_request([3, 4], 2), **names)
        failed = (await router.read("failed")).failed
        assert (failed.error, failed.retryable, failed.handle) == ("InvalidRequest", False, 1)
        assert TOO_LONG in failed.message
        await router.submit(2, make_request([3, 4], 2))
        assert [token for _, token in await router.tokens(2)] == fake_output([3, 4], 2)
        await router.close()


async def test_a_router_that_offers_by_a_long_id_is_refused_and_its_request_runs_on() -> None:
    async with worker() as (service, address):
        router = Router(address)
        await router.submit(1, make_request([3, 4], 50))
        await router.send(offer=worker_pb2.Offer(handle=1, handoff_id=LONG))
        await router.send(offer_prefix=worker_pb2.OfferPrefix(handoff_id=LONG, token_ids=[3, 4]))
        failed = (await router.read("failed")).failed
        assert (failed.error, failed.handoff, failed.handle) == ("HandoffError", True, 1)
        assert TOO_LONG in failed.message
        await router.submit(2, make_request([3, 4], 2))
        assert [token for _, token in await router.tokens(2)] == fake_output([3, 4], 2)
        assert (await router.idle_state()).num_open_handoffs == 0
        source = service._source
        assert not any(len(handoff_id) > MAX_CHARS for handoff_id in (*source._open, *source._ended))
        await router.close()


Calls = kv_pb2_grpc.KVHandoffStub
SUBSCRIBE = {"handoff_id": "h", "source_incarnation": "s", "sink_incarnation": "i", "transports": ["grpc"]}


@pytest.mark.parametrize(
    ("call", "request_of"),
    [
        *((name, lambda **ids: kv_pb2.SubscribeRequest(**{**SUBSCRIBE, **ids})) for name in ["Subscribe"]),
        ("Pull", kv_pb2.PullRequest),
        ("Renew", kv_pb2.RenewRequest),
        ("Release", kv_pb2.ReleaseRequest),
        ("Abandon", kv_pb2.AbandonRequest),
    ],
)
@pytest.mark.parametrize("name", ["handoff_id", "sink_incarnation"])
async def test_a_sink_with_a_long_id_is_refused_by_every_call(
    call: str, request_of: Callable[..., Any], name: str
) -> None:
    assert name in await refusal(call, request_of(**{name: LONG}))


@pytest.mark.parametrize(
    "names",
    [{"source_incarnation": LONG}, {"wire_dtype": LONG}, {"machine": LONG}, {"transports": [LONG]}],
    ids=["source_incarnation", "wire_dtype", "machine", "transports"],
)
async def test_a_subscription_with_a_long_name_is_refused(names: dict[str, Any]) -> None:
    await refusal("Subscribe", kv_pb2.SubscribeRequest(**{**SUBSCRIBE, **names}))


async def test_a_subscription_with_many_names_is_refused() -> None:
    request = kv_pb2.SubscribeRequest(**{**SUBSCRIBE, "transports": ["grpc"] * 1000})
    await refusal("Subscribe", request, "1,000 transports; at most 16")


async def refusal(call: str, request: Any, reason: str = TOO_LONG) -> str:
    """A source that answers with `reason`."""
    async with serve() as served, open_channel(served.address) as channel:
        method = getattr(kv_pb2_grpc.KVHandoffStub(channel), call)(request, timeout=TIMEOUT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (method.read() if call in ("Subscribe", "Pull") else method)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert served.source.num_open == 0 and not served.source._expected
    said = caught.value.details() or ""
    assert reason in said
    return said
