"""Trial of a worker before it serves: it must answer a request of two tokens, the second of them by a decode step, with
finite log-probabilities; and its model must be what the cluster serves, but for its weights."""

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
from ...workers.common.errors import InternalError, WorkerLost
from ...workers.common.tls import LinkTls
from ...workers.core.runner import ModelInfo

TRIAL_S = 120.0  # the first steps of a worker may compile what they run
PROMPT = (1, 2, 3)
NUM_TOKENS = 2  # the first token is the prefill's


async def try_worker(address: str, serving: Iterable[str], token: str | None, tls: LinkTls | None) -> None:
    """Put the worker at `address` to the trial. `serving`: addresses of those that serve; the model of the first that
    answers counts. Raises ConfigError for another model, InternalError for a wrong answer, WorkerLost for none."""
    try:
        async with asyncio.timeout(TRIAL_S):
            served = await _served_model(serving, token, tls)
            async with _link(address, token, tls) as (call, model):
                if served is not None:
                    served.check_same(model)
                await call.write(worker_pb2.RouterMessage(submit=_submit(model.vocab_size)))
                _check(await _answer(call))
    except TimeoutError as e:
        raise InternalError(f"its trial was not over within {TRIAL_S:g} s") from e
    except (grpc.aio.AioRpcError, grpc.aio.UsageError) as e:
        raise WorkerLost(f"it was lost in its trial: {e}") from e


async def _served_model(serving: Iterable[str], token: str | None, tls: LinkTls | None) -> ModelInfo | None:
    """Ask one after another, for one may have just died; None where none answers."""
    for address in serving:
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, WorkerLost):
            async with _link(address, token, tls) as (_, model):
                return model
    return None


@asynccontextmanager
async def _link(address: str, token: str | None, tls: LinkTls | None) -> AsyncGenerator[tuple[Any, ModelInfo]]:
    """A stream to a worker, and the model that it serves."""
    async with open_channel(address, tls) as channel:
        call: Any = worker_pb2_grpc.WorkerStub(channel).Link(metadata=auth_metadata(token))
        try:
            yield call, _read_hello(await call.read())
        finally:
            call.cancel()


def _read_hello(received: object) -> ModelInfo:
    if not isinstance(received, worker_pb2.WorkerMessage) or not received.HasField("hello"):
        raise WorkerLost("its stream did not begin with a hello")
    return ModelInfo.from_proto(received.hello.model)


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
