"""What a request's service level, thought budget, drafts, attention and trace are on the wire."""

import math
from dataclasses import dataclass, replace

import pytest

from diptych.workers.common.errors import InvalidRequest
from diptych.workers.common.request import MAX_PREDICTION_TOKENS, RequestLevel, ThoughtBudget
from diptych.workers.common.wire import request_from_submit, submit_from_request
from diptych.workers.telemetry.trace_context import SpanContext, parse_context

from ...support.sequences import make_request

REQUEST = make_request([1, 2, 3])


@dataclass(frozen=True)
class Traced:
    traceparent: str
    tracestate: str


@pytest.mark.parametrize("times", [(None, None), (0.5, None), (None, 0.02), (60.0, 1.0)])
def test_a_level_arrives_as_it_was_sent(times: tuple[float | None, float | None]) -> None:
    sent = replace(REQUEST, level=RequestLevel(*times))
    assert request_from_submit(submit_from_request(1, sent, []), 4096).level == RequestLevel(*times)


def test_a_worker_learns_the_times_alone() -> None:
    sent = replace(REQUEST, level=RequestLevel(0.5, refuse=True, model="chat", tier="flex"))
    assert request_from_submit(submit_from_request(1, sent, []), 4096).level == RequestLevel(0.5)


def test_a_budget_of_thoughts_arrives_as_it_was_sent_and_is_checked() -> None:
    thought = ThoughtBudget(7, begin_id=998, end_id=999, is_open=True)
    sent = replace(REQUEST, sampling=replace(REQUEST.sampling, thought=thought))
    found = request_from_submit(submit_from_request(1, sent, []), 4096)
    assert found.sampling.thought == thought
    found.validate(1000, 4096)
    with pytest.raises(InvalidRequest, match="token id 999"):
        found.validate(999, 4096)


@pytest.mark.parametrize("speculates", [True, False])
@pytest.mark.parametrize("prediction", [(), (7, 0, 999, 7)])
def test_the_wish_for_drafts_arrives_as_it_was_sent(speculates: bool, prediction: tuple[int, ...]) -> None:
    sent = replace(REQUEST, speculates=speculates, prediction=prediction)
    found = request_from_submit(submit_from_request(1, sent, [5]), 4096)
    assert (found.speculates, found.prediction) == (speculates, prediction)
    found.validate(1000, 4096, [5])


@pytest.mark.parametrize("asked", [None, True, False])
def test_the_wish_for_sparse_attention_arrives_as_it_was_sent(asked: bool | None) -> None:
    message = submit_from_request(1, replace(REQUEST, sparse_attention=asked), [5])
    assert request_from_submit(message, 4096).sparse_attention is asked


def test_a_prediction_is_checked_by_the_worker_too() -> None:
    message = submit_from_request(1, replace(REQUEST, prediction=(999,)), [])
    with pytest.raises(InvalidRequest, match="prediction: token id 999") as refused:
        request_from_submit(message, 4096).validate(999, 4096)
    assert refused.value.param == "prediction"
    message.prediction[:] = [1] * MAX_PREDICTION_TOKENS
    request_from_submit(message, 4096).validate(999, 4096)
    message.prediction.append(1)
    with pytest.raises(InvalidRequest, match="65537 tokens; at most 65536"):
        request_from_submit(message, 4096)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e9])
@pytest.mark.parametrize("name", ["ttft_s", "tpot_s"])
def test_a_time_that_no_level_has_is_refused_by_the_worker_too(name: str, value: float) -> None:
    message = submit_from_request(1, REQUEST, [])
    setattr(message.level, name, value)
    with pytest.raises(InvalidRequest, match=name) as refused:
        request_from_submit(message, 4096).validate(1000, 4096)
    assert refused.value.param == name


def test_a_trace_is_sent_in_the_words_of_w3c() -> None:
    context = SpanContext("a" * 32, "b" * 16, True, "x=1")
    sent = submit_from_request(1, replace(REQUEST, trace=Traced(context.traceparent, context.state)), [])
    assert parse_context(sent.traceparent, sent.tracestate) == context
    untraced = submit_from_request(1, REQUEST, [])
    assert (untraced.traceparent, untraced.tracestate) == ("", "")
