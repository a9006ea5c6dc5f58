"""Trial of a worker before it serves: it must answer a request of two tokens, the second of them by a decode step, with
finite log-probabilities; its model must be what the cluster serves, but for its weights, and these must be those of the
workers with the same settings."""

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio

from ...proto import inference_pb2, worker_pb2, worker_pb2_grpc
from ...workers.common.channel import auth_metadata, each_of, open_channel
from ...workers.common.errors import CheckpointError, InternalError, WorkerLost
from ...workers.common.tls import LinkTls
from ...workers.core.runner import ModelInfo
from ...workers.kv.layout import KVLayout
from ...workers.kv.layout_check import check_bridge
from ..common.handles import WorkerStarted
from ..routing.fleet import WorkerInfo

TRIAL_S = 120.0  # the first steps of a worker may compile what they run
PROMPT = (1, 2, 3)
NUM_TOKENS = 2  # the first token is the prefill's


async def try_worker(
    worker: WorkerStarted, serving: Iterable[WorkerInfo], token: str | None, tls: LinkTls | None
) -> None:
    """Put a worker to the trial. `serving`: those that serve; the first that answers counts. Raises ConfigError for
    another model, CheckpointError for other weights than one with the same settings has, LayoutMismatch for KV that
    cannot move to it, InternalError for a wrong answer, WorkerLost for none."""
    try:
        async with asyncio.timeout(TRIAL_S):
            served = await _first_of(sorted(serving, key=lambda w: w.generation != worker.generation), token, tls)
            async with _link(worker.address, token, tls) as (call, hello):
                model = ModelInfo.from_proto(hello.model)
                if served is not None:
                    _check_served(*served, worker.generation, hello)
                await call.write(worker_pb2.RouterMessage(submit=_submit(model.vocab_size)))
                _check(await _answer(call))
    except TimeoutError as e:
        raise InternalError(f"its trial was not over within {TRIAL_S:g} s") from e
    except (grpc.aio.AioRpcError, grpc.aio.UsageError) as e:
        raise WorkerLost(f"it was lost in its trial: {e}") from e


async def _first_of(
    serving: Iterable[WorkerInfo], token: str | None, tls: LinkTls | None
) -> tuple[int, worker_pb2.Hello] | None:
    """Ask one after another, for one may have just died; return the generation and the hello of the first that answers,
    None where none does."""
    for each in serving:
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, WorkerLost):
            async with _link(each.address, token, tls) as (_, hello):
                return each.generation, hello
    return None


def _check_served(generation: int, served: worker_pb2.Hello, own: int, hello: worker_pb2.Hello) -> None:
    """Raise where routers would refuse the worker of `hello`. `generation`: of the one that serves; `own`: its own."""
    ModelInfo.from_proto(served.model).check_same(ModelInfo.from_proto(hello.model))
    if generation != own:
        return
    layout, other = KVLayout.from_proto(served.layout), KVLayout.from_proto(hello.layout)
    if layout.model_id != other.model_id:
        raise CheckpointError(
            "its weights are not those of the workers with the same settings that serve: another checkpoint was copied "
            "over this one. Put the old one back, or upgrade to a checkpoint in a folder of its own"
        )
    check_bridge(layout, other)


@asynccontextmanager
async def _link(address: str, token: str | None, tls: LinkTls | None) -> AsyncGenerator[tuple[Any, worker_pb2.Hello]]:
    """A stream to a worker, and its first message."""
    async with open_channel(address, tls) as channel:
        call: Any = worker_pb2_grpc.WorkerStub(channel).Link(metadata=auth_metadata(token))
        try:
            yield call, _read_hello(await call.read())
        finally:
            call.cancel()


def _read_hello(received: object) -> worker_pb2.Hello:
    if not isinstance(received, worker_pb2.WorkerMessage) or not received.HasField("hello"):
        raise WorkerLost("its stream did not begin with a hello")
    return received.hello


def _submit(vocab_size: int) -> worker_pb2.Submit:
    sampling = inference_pb2.SamplingParams(temperature=0.0, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    prompt = [token_id % vocab_size for token_id in PROMPT]
    return worker_pb2.Submit(
        handle=1,
        request_id=f"trial-{uuid.uuid4().hex}",
        prompt_token_ids=prompt,
        sampling=sampling,
        timeout_s=TRIAL_S,
    )


async def _answer(call: Any) -> list[worker_pb2.StepEvents]:
    """Read its steps until the request has ended. Raises InternalError where it fails."""
    steps: list[worker_pb2.StepEvents] = []
    while isinstance(received := await call.read(), worker_pb2.WorkerMessage):
        for message in each_of(received):
            if message.HasField("failed"):
                raise InternalError(f"its trial failed: {message.failed.message}")
            if message.HasField("step"):
                steps.append(message.step)
        if any(reason for step in steps for reason in step.finish_reasons):
            return steps
    raise WorkerLost("its stream ended in its trial")


def _check(steps: list[worker_pb2.StepEvents]) -> None:
    num_tokens = sum(len(step.token_ids) for step in steps)
    logprobs = [each.logprob for step in steps for each in step.logprobs]
    if num_tokens != NUM_TOKENS or len(logprobs) != NUM_TOKENS:
        raise InternalError(f"its trial gave {num_tokens} tokens instead of {NUM_TOKENS}")
    if not all(math.isfinite(logprob) for logprob in logprobs):
        raise InternalError("its trial gave log-probabilities that are no numbers: check the checkpoint's weights")
