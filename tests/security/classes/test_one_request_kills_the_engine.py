"""No single request ends an engine: hostile values on a real one, beside a request that runs on."""

from contextlib import aclosing, suppress
from typing import Any

import pytest

from diptych.cluster.front.front_door import FrontDoor, GenerationSpec
from diptych.proto import inference_pb2, worker_pb2
from diptych.workers.common.errors import DiptychError
from diptych.workers.common.request import SamplingParams
from diptych.workers.testing.fake_runner import fake_output

from ...cluster.routing.test_router_with_workers import cluster
from ...support.front import byte_tokenizer
from ...support.sequences import make_request
from ...workers.server.test_service import Router, worker

NAN, INF = float("nan"), float("inf")
SUBMITS: list[dict[str, Any]] = [
    {"prompt_token_ids": [2**32 - 1]},
    {"prompt_token_ids": [7] * 100_000},
    {"output_token_ids": [2**32 - 1]},
    {"output_token_ids": list(range(600))},
    {"timeout_s": NAN},
    {"timeout_s": -1.0},
    {"cache_salt": b"x" * 100_000},
    {"tenant": b"x" * 100_000},
    {"num_alone": 2**32 - 1},
    {"first_prompt_logprob": 2**32 - 1},
    {"offer": worker_pb2.HandoffOffer(handoff_id="h", is_prefix=True), "num_alone": 5},
    {"source": worker_pb2.HandoffSource(handoff_id="h", address="256.0.0.1:99999", incarnation="i")},
    {"prefix": worker_pb2.HandoffSource(handoff_id="h", address="", incarnation="")},
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": NAN},
    {"temperature": INF},
    {"temperature": -1.0},
    {"top_p": NAN},
    {"top_p": 0.0},
    {"min_p": 2.0},
    {"repetition_penalty": 0.0},
    {"presence_penalty": NAN},
    {"frequency_penalty": INF},
    {"logit_bias": {2**31 - 1: 1.0}},
    {"logit_bias": {1: NAN}},
    {"logprobs": 2**31 - 1},
    {"prompt_logprobs": 2**31 - 1},
    {"max_tokens": 2**31 - 1},
    {"max_tokens": 0},
    {"min_tokens": 2**31 - 1},
    {"stop_token_ids": [2**32 - 1]},
    {"stop_token_ids": range(100_000)},
    {"grammar": inference_pb2.Grammar(kind=99, text="x")},  # type: ignore[arg-type]
    {"grammar": inference_pb2.Grammar(text="start: start start")},
]


@pytest.mark.parametrize(
    ("submit", "sampling"), [*((s, {}) for s in SUBMITS), *(({}, s) for s in SAMPLING)], ids=" ".join
)
async def test_a_worker_survives_every_value_of_the_wire(submit: dict[str, Any], sampling: dict[str, Any]) -> None:
    async with worker() as (_, address):
        router = Router(address)
        await router.submit(1, make_request([3, 4], 100))
        await router.tokens(1, until_finished=False)
        message = worker_pb2.Submit(handle=2, request_id="hostile", prompt_token_ids=[5], timeout_s=5.0)
        message.sampling.MergeFrom(inference_pb2.SamplingParams(seed=1, max_tokens=4))
        for name in submit:
            message.ClearField(name)
        message.MergeFrom(worker_pb2.Submit(**submit))
        message.sampling.MergeFrom(inference_pb2.SamplingParams(**sampling))
        await router.send(submit=message)
        await router.send(abort=worker_pb2.Abort(handle=2))
        await router.submit(3, make_request([8, 9], 3))
        found: dict[int, list[int]] = {1: [], 2: [], 3: []}
        done: set[int] = set()
        while not {1, 3} <= done:
            step = (await router.read("step")).step
            for i, of in enumerate(step.handles):
                found[of].append(step.token_ids[i])
                if step.finish_reasons[i]:
                    done.add(of)
        assert fake_output([3, 4], 100)[-len(found[1]) :] == found[1] and found[3] == fake_output([8, 9], 3)
        assert (await router.idle_state()).load.num_failed_steps == 0
        await router.close()


async def test_the_next_request_is_answered_by_the_same_engine() -> None:
    hostile: list[dict[str, Any]] = [
        {"prompts": ((10**9,),)},
        {"prompts": ((-1,),)},
        {"prompts": ((),)},
        {"prompts": (tuple([7] * 100_000),)},
        {"max_tokens": 10**12},
        {"n": 10**9},
        {"timeout_s": 1e-9},
        {"seed": -(2**63)},
        *(
            {"sampling": SamplingParams(**s)}
            for s in SAMPLING
            if not {"grammar", "logit_bias", "stop_token_ids"} & s.keys()
        ),
    ]
    async with cluster("mixed") as running:
        door = FrontDoor(running.router, byte_tokenizer())
        (before,) = running.workers
        for number, fields in enumerate(hostile):
            spec = GenerationSpec(**{"prompts": ((3, 4),), "sampling": SamplingParams(), "max_tokens": 2, **fields})
            with suppress(DiptychError):
                await answer(door, spec, f"hostile-{number}")
        spec = GenerationSpec(((3, 4),), SamplingParams(temperature=0.0), max_tokens=3)
        assert await answer(door, spec, "healthy") == fake_output([3, 4], 3)
        assert [view.incarnation for view in running.router.workers()] == [before.info.incarnation]
        await door.close()


async def answer(door: FrontDoor, spec: GenerationSpec, request_id: str) -> list[int]:
    generation = await door.start(spec, request_id)
    tokens: list[int] = []
    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            tokens += [token for delta in batch for token in delta.token_ids]
    return tokens
