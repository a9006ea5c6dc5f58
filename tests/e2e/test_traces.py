"""Traces of a disaggregated request: a router and two worker processes, and a collector that gets their spans."""

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import httpx
import pytest

from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.common.handles import RouterStarted
from diptych.cluster.placement.router_process import RouterProcess
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.proto import inference_pb2, inference_pb2_grpc

from ..support.harness import TINY, WorkerHandle, workers
from ..support.otlp_collector import Collected, Collector, http_collector

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SECRET = "xylophone"
NUM = 300  # tokens: so many do not come in one message with the second, however busy the machine is
BODY = {"prompt": f"The {SECRET} " * 20, "max_tokens": NUM, "temperature": 0, "ignore_eos": True, "timings": True}
PHASES = ("queue_s", "prefill_s", "deliver_first_s", "last_segment_s", "commit_s", "first_decode_s", "deliver_second_s")
MOST_APART_S = 0.002
SERVER, INTERNAL = 2, 1

pytestmark = pytest.mark.e2e


@asynccontextmanager
async def routed(handles: list[WorkerHandle], collector: Collector, **settings: Any) -> AsyncIterator[RouterStarted]:
    # By roles: a route that is predicted to be faster may be one worker alone.
    router = {"http_port": 0, "grpc_port": 0, "worker_timeout_s": 60, "predict": False, **settings}
    config = build(
        {
            "model": str(TINY),
            "router": router,
            "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
            "otlp_endpoint": collector.endpoint,
        }
    )
    thresholds = gc.get_threshold()
    process = RouterProcess(Deployment(config, "", is_local=True))
    process.update_fleet(WorkerInfo(h.incarnation, h.address, h.role, h.role, f"{h.role}-1") for h in handles)
    started = await process.start()
    try:
        async with httpx.AsyncClient() as client:
            while await num_known(client, started) < len(handles):  # one alone would serve, too
                await asyncio.sleep(0.01)
        yield started
    finally:
        await process.stop()
        gc.unfreeze()  # what a router excludes from collections, because it is a process of its own
        gc.set_threshold(*thresholds)


async def num_known(client: httpx.AsyncClient, at: RouterStarted) -> int:
    """Number of workers that the router would send requests to."""
    health = (await client.get(f"http://127.0.0.1:{at.http_port}/health")).json()
    return health["prefill_workers"] + health["decode_workers"]


def tree_of(spans: Sequence[Collected], trace_id: str) -> list[Collected]:
    """Spans of a trace, once those of both workers and the router's are there; else none."""
    found = [span for span in spans if span.trace_id == trace_id]
    names = {span.name for span in found if span.kind == SERVER}
    return found if {"prefill", "decode"} < names and len(names) == 3 else []


def check_tree(tree: Sequence[Collected], name: str) -> tuple[Collected, dict[str, Collected]]:
    """Returns the call's span and its phases."""
    (call,) = [span for span in tree if span.name == name]
    by_id = {span.span_id: span for span in tree}
    assert all(span.parent_id in by_id for span in tree if span is not call)
    phases = {s.name: s for s in tree if s.parent_id == call.span_id and "diptych.phase" in s.attributes}
    in_order = sorted(phases.values(), key=lambda span: (span.start_ns, span.end_ns))
    assert (in_order[0].start_ns, in_order[-1].end_ns) == (call.start_ns, call.end_ns)
    assert all(one.end_ns == next_.start_ns for one, next_ in itertools.pairwise(in_order))
    assert sum(span.duration_s for span in in_order) == pytest.approx(call.duration_s, abs=1e-6)
    return call, phases


def check_workers(tree: Sequence[Collected], call: Collected, phases: dict[str, Collected]) -> None:
    """Check that both workers' own spans are in the tree, and say what the router's say."""
    of = {s.name: s for s in tree if s.parent_id == call.span_id and "diptych.phase" not in s.attributes}
    assert of.keys() == {"prefill", "decode"}
    for role, span in of.items():
        assert (span.kind, span.resource["service.name"]) == (SERVER, "diptych-worker")
        assert span.resource["diptych.role"] == role
        assert span.attributes["diptych.request.id"] == f"{call.attributes['gen_ai.response.id']}-0"
    source = {s.name: s for s in tree if s.parent_id == of["prefill"].span_id}
    sink = {s.name: s for s in tree if s.parent_id == of["decode"].span_id}
    assert source.keys() == {"queue", "prefill"}
    assert sink.keys() == {"queue", "first_decode", "announce_to_pull", "pull", "last_segment", "release"}
    assert source["prefill"].duration_s == pytest.approx(phases["prefill"].duration_s, abs=1e-6)
    assert sink["pull"].attributes["diptych.handoff.bytes"] == call.attributes["diptych.handoff.bytes"] > 0
    assert phases["prefill"].attributes["diptych.worker"] == "prefill-1"
    assert phases["decode"].attributes["diptych.worker"] == "decode-1"


async def test_the_spans_of_a_disaggregated_request_sum_to_what_its_client_was_told() -> None:
    with http_collector() as collector, workers(TINY, ["prefill", "decode"], otlp_endpoint=collector.endpoint) as crew:
        async with routed(crew, collector) as at, httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{at.http_port}/v1/completions"
            headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=7"}
            answer = await client.post(url, json=BODY, headers=headers)
            rpc_tree = await traced_rpc(at, collector)
            metrics = (await client.get(f"http://127.0.0.1:{at.http_port}/metrics")).text
        assert answer.status_code == 200, answer.text
        tree = await asyncio.to_thread(collector.wait_for, lambda spans: tree_of(spans, TRACE_ID))
    call, phases = check_tree(tree, "text_completion tiny")
    assert answer.headers["traceresponse"] == f"00-{TRACE_ID}-{call.span_id}-01"
    assert (call.parent_id, call.state, call.kind) == (PARENT_ID, "vendor=7", SERVER)
    check_workers(tree, call, phases)
    (timings,) = answer.json()["timings"]
    told_s = {f"{name}_s": span.duration_s for name, span in phases.items()}
    for name in PHASES:
        assert told_s.get(name, 0.0) == pytest.approx(timings[name], abs=MOST_APART_S)
    own_s = sum(span.duration_s for name, span in phases.items() if name not in ("prepare", "respond"))
    assert own_s == pytest.approx(timings["total_s"], abs=MOST_APART_S)
    usage, said = answer.json()["usage"], call.attributes
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == NUM
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["gen_ai.request.model"] == "tiny"
    assert (said["http.route"], said["http.response.status_code"]) == ("/v1/completions", 200)
    ttft_s = sum(timings[name] for name in PHASES[:3])
    assert said["gen_ai.server.time_to_first_token"] == pytest.approx(ttft_s, abs=MOST_APART_S)
    assert [name for name, _ in call.events] == ["submitted", "submitted"]
    assert SECRET not in repr(tree)
    check_tree(rpc_tree, "text_completion tiny")
    assert "diptych_traces_dropped_total 0.0" in metrics


async def traced_rpc(at: RouterStarted, collector: Collector) -> list[Collected]:
    """Spans of a gRPC call with a parent."""
    trace_id = TRACE_ID[::-1]
    metadata = (("traceparent", f"00-{trace_id}-{PARENT_ID}-01"),)
    request = inference_pb2.GenerateRequest(
        text="Once upon a time", sampling=inference_pb2.SamplingParams(max_tokens=8)
    )
    request.sampling.ignore_eos = True
    async with grpc.aio.insecure_channel(f"127.0.0.1:{at.grpc_port}") as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata)
        sent = dict(await call.initial_metadata())
        [_ async for _ in call]
    tree = await asyncio.to_thread(collector.wait_for, lambda spans: tree_of(spans, trace_id))
    (own,) = [span for span in tree if span.parent_id == PARENT_ID]
    assert sent["traceresponse"] == f"00-{trace_id}-{own.span_id}-01"
    assert own.attributes["rpc.grpc.status_code"] == 0
    return tree
