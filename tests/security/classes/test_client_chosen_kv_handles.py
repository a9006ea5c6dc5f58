"""KV is named by servers: no field of a client's request names blocks, workers or hand-offs, and guessed names fail."""

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.descriptor import Descriptor

from diptych.cluster.front.limits import RequestLimits
from diptych.proto import inference_pb2, kv_pb2, kv_pb2_grpc, worker_pb2
from diptych.workers.common.channel import open_channel
from diptych.workers.testing.fake_runner import fake_output

from ...support.front import Echo, served
from ...support.sequences import make_request
from ...workers.server.test_service import Router, worker

# What other servers take from clients.
HANDLES = {
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "remote_engine_id": "0",
        "remote_block_ids": [0, 1],
        "remote_host": "203.0.113.1",
        "remote_port": 1,
    },
    "bootstrap_host": "203.0.113.1",
    "bootstrap_port": 1,
    "bootstrap_room": 7,
    "disaggregated_params": {"request_type": "generation_only", "ctx_request_id": 1},
    "prefill_worker_id": 0,
    "handoff_id": "h",
    "block_ids": [0],
}
NAMED = ("handoff", "block", "worker", "incarnation", "address", "host", "port", "lease", "remote")


@pytest.mark.parametrize("name", HANDLES)
def test_a_body_that_names_kv_changes_nothing_or_is_refused(name: str) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "seed": 1, "ignore_eos": True}
    source = Echo(laps=1)
    with served(source) as server:
        answers = [
            httpx.post(f"{server.url}/v1/completions", json=body | fields) for fields in ({}, {name: HANDLES[name]})
        ]
    if answers[1].status_code == 200:
        plain, named = source.requests
        assert (plain.prompt_token_ids, plain.sampling) == (named.prompt_token_ids, named.sampling)
    else:
        assert answers[1].status_code == 400 and name in answers[1].json()["error"]["message"]
        assert len(source.requests) == 1
    with served(Echo(laps=1), limits=RequestLimits(strict=True)) as server:
        refused = httpx.post(f"{server.url}/v1/completions", json=body | {name: HANDLES[name]})
        assert refused.status_code == 400 and name in refused.json()["error"]["message"]


def fields_of(message: Descriptor, seen: set[str]) -> set[str]:
    if message.full_name in seen:
        return set()
    seen.add(message.full_name)
    names = {field.name for field in message.fields}
    return names.union(*(fields_of(f.message_type, seen) for f in message.fields if f.message_type), set())


def test_no_field_of_a_grpc_request_names_kv() -> None:
    names = fields_of(inference_pb2.GenerateRequest.DESCRIPTOR, set())
    assert {"prompt", "sampling", "cache_salt"} & names
    assert not [name for name in names if any(part in name.split("_") for part in NAMED)]


@pytest.mark.parametrize("guess", ["", "0", "1", "handoff-0", "../0", "0" * 32])
async def test_a_guessed_hand_off_is_refused_by_the_source(guess: str) -> None:
    """Even with the token: an id that was not given out opens nothing, while a hand-off with another one is open."""
    async with worker() as (_, address):
        router = Router(address)
        await router.submit(1, make_request([3, 4], 50), offer=worker_pb2.HandoffOffer(handoff_id="f" * 32))
        await router.tokens(1, until_finished=False)
        async with open_channel(address) as channel:
            stub = kv_pb2_grpc.KVHandoffStub(channel)
            request = kv_pb2.SubscribeRequest(
                handoff_id=guess, source_incarnation="s", sink_incarnation="i", transports=["grpc"]
            )
            call = stub.Subscribe(request, timeout=30)
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in call:
                    raise AssertionError("the source announced KV to a stranger")
        await router.send(abort=worker_pb2.Abort(handle=1))
        await router.submit(2, make_request([3, 4], 2))
        assert [token for _, token in await router.tokens(2)] == fake_output([3, 4], 2)
        await router.close()
