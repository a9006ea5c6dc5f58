"""Nobody ends a request that is not his: not a client by its id, not a router by its handle."""

import asyncio

import httpx
import pytest

from diptych.proto import inference_pb2, worker_pb2
from diptych.workers.testing.fake_runner import fake_output

from ...support.front import Echo, served
from ...support.sequences import make_request
from ...workers.server.test_service import Router, worker

KEY = "sesame-sesame"


def test_no_route_and_no_call_ends_a_request_by_its_id() -> None:
    assert {method.name for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods} == {
        "Embed",
        "Generate",
        "GetModel",
    }
    source = Echo(laps=1)
    source.gate.clear()
    headers = {"authorization": f"Bearer {KEY}"}
    with served(source, api_key=KEY) as server, httpx.Client(base_url=server.url, headers=headers) as http:
        started = source.all_started(1)

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as other:
                return await other.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3})

        async def attack() -> httpx.Response:
            answer = asyncio.create_task(ask())
            await asyncio.to_thread(started.wait, 30)
            (request,) = source.requests
            name = request.request_id.rsplit("-", 1)[0]
            for its_id in (name, request.request_id, name.replace("cmpl", "req")):
                for path in (f"/v1/completions/{its_id}", f"/v1/completions/{its_id}/cancel", f"/abort/{its_id}"):
                    for method in ("POST", "DELETE"):
                        refused = await asyncio.to_thread(http.request, method, path, json={"request_id": its_id})
                        assert refused.status_code in {404, 405}
            assert not source.closed
            server.open_gate()
            return await answer

        assert asyncio.run(attack()).json()["choices"][0]["text"] == "abc"


def test_a_client_does_not_choose_its_id() -> None:
    source = Echo(laps=1)
    with served(source) as server:
        url, headers = f"{server.url}/v1/completions", {"x-request-id": "req-mine"}
        answered = httpx.post(url, json={"prompt": "abc", "max_tokens": 3}, headers=headers)
        httpx.post(url, json={"prompt": "abc", "max_tokens": 3, "request_id": "mine", "id": "mine"})
    assert answered.status_code == 200 and answered.headers["x-request-id"] != "req-mine"
    assert source.requests and not [request for request in source.requests if "mine" in request.request_id]


@pytest.mark.parametrize("handle", [1, 2, 0, 2**64 - 1])
async def test_a_router_does_not_end_anothers_request_by_its_handle(handle: int) -> None:
    async with worker() as (_, address):
        mine, theirs = Router(address), Router(address)
        await mine.submit(1, make_request([3, 4], 40))
        await mine.submit(2, make_request([5, 6], 40))
        await theirs.send(abort=worker_pb2.Abort(handle=handle))
        await theirs.submit(9, make_request([3, 4], 2))
        assert [token for _, token in await theirs.tokens(9)] == fake_output([3, 4], 2)  # after the abort
        await theirs.close()
        found: dict[int, list[int]] = {1: [], 2: []}
        done: set[int] = set()
        while done != {1, 2}:
            step = (await mine.read("step")).step
            for i, of in enumerate(step.handles):
                found[of].append(step.token_ids[i])
                if step.finish_reasons[i]:
                    done.add(of)
        assert found == {1: fake_output([3, 4], 40), 2: fake_output([5, 6], 40)}
        await mine.close()
