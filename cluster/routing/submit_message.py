"""Builds the protobuf message that submits a worker request."""

from dataclasses import replace

from ...proto import worker_pb2
from ...workers.common.request import SamplingParams
from ...workers.common.wire import submit_from_request
from .actions import Part, RequestFacts, Submit
from .fleet import Fleet
from .request_state import RequestState

NOTHING_SAMPLED = SamplingParams(max_tokens=1)  # with a prefix


def submit_message(submit: Submit, state: RequestState, fleet: Fleet, timeout_s: float) -> worker_pb2.Submit:
    """Message for `submit`. `fleet`: gives the addresses of the workers to pull from."""
    worker_request, request = submit.worker_request, state.request
    if submit.move_at is not None:
        tokens = tuple(state.all_token_ids()[: submit.move_at])
        request = replace(request, prompt_token_ids=tokens, sampling=NOTHING_SAMPLED, prediction=())
    elif worker_request.part is Part.PREFILL and request.prediction:
        request = replace(request, prediction=())  # it makes one token, which nothing drafts
    message = submit_from_request(worker_request.handle, request, list(submit.output_token_ids))
    message.timeout_s = timeout_s
    message.num_alone = state.failures.num_alone(len(submit.output_token_ids))
    if worker_request.part is Part.DECODE or state.prompt.is_complete:  # the source computes the prompt
        message.sampling.ClearField("prompt_logprobs")
    message.first_prompt_logprob = state.prompt.next
    if submit.prefix is not None:
        _set_source(message.prefix, fleet, submit.prefix.worker, submit.prefix.handoff_id)
        message.prefix.is_computing = submit.prefix.num_computing > 0
    if submit.source is not None:
        _set_source(message.source, fleet, submit.source, submit.handoff_id or "")
    elif submit.handoff_id is not None:
        message.offer.handoff_id, message.offer.is_prefix = submit.handoff_id, submit.move_at is not None
    return message


def _set_source(source: worker_pb2.HandoffSource, fleet: Fleet, worker: str, handoff_id: str) -> None:
    source.handoff_id, source.incarnation, source.address = handoff_id, worker, fleet.view(worker).info.address


def num_to_prefill(submit: Submit, facts: RequestFacts) -> int:
    """Number of tokens that the worker has to prefill."""
    worker, part = submit.worker_request.worker, submit.worker_request.part
    if part is Part.DECODE:
        return 0
    if submit.move_at is not None:
        return max(submit.move_at - facts.held_tokens(worker), 1)
    num_pulled = submit.prefix.num_computing if submit.prefix is not None else 0
    return facts.num_tokens - max(facts.held_tokens(worker), num_pulled)
