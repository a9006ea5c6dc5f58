"""Exchanges as an Envoy makes them: messages in, answers out."""

import gzip
import itertools
import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from diptych.cluster.common.quota import Quota
from diptych.cluster.picker.exchange import Exchange
from diptych.cluster.picker.messages import DESTINATION, NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE, Request, Response
from diptych.cluster.picker.reading import ReadingRules, RequestHead
from diptych.proto import envoy_processing_mode_pb2
from diptych.workers.common.errors import DiptychError, InvalidRequest, Overloaded, Unavailable

MODES = envoy_processing_mode_pb2.ProcessingMode
MAX_BYTES = 200_000


class Choice:
    """Chooses what it is told to, and notes what it was asked."""

    def __init__(self, endpoints: Sequence[str] = ("10.0.0.1:80",)) -> None:
        self.endpoints = list(endpoints)
        self.error: DiptychError | None = None
        self.asked: list[tuple[RequestHead, frozenset[str] | None, str]] = []
        self.doubted: list[str] = []

    def choose(self, head: RequestHead, subset: frozenset[str] | None, call: str) -> list[str]:
        self.asked.append((head, subset, call))
        if self.error is not None:
            raise self.error
        return self.endpoints

    def doubt(self, endpoints: Sequence[str]) -> None:
        self.doubted += endpoints


RULES = ReadingRules({"batch": -1, "chat": 5}, {"public": "served"}, reads_rewrite_header=True)


def exchange(choice: Choice | None = None, rules: ReadingRules = RULES) -> Exchange:
    return Exchange(choice or Choice(), rules, Quota(MAX_BYTES * 8, "too much").share(), MAX_BYTES)


def headers(path: str = "/v1/completions", method: str = "POST", ends: bool = False, **more: Any) -> Request:
    found = {":method": method, ":path": path} | {name.replace("_", "-"): value for name, value in more.items()}
    message = Request()
    for name, value in found.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = ends
    return message


def body(data: bytes, *, ends: bool = False, answer: bool = False) -> Request:
    message = Request()
    part = message.response_body if answer else message.request_body
    part.body, part.end_of_stream = data, ends
    return message


def answer_headers(status: str = "200", served: str = "", **more: str) -> Request:
    message = Request()
    for name, value in {":status": status, **{k.replace("_", "-"): v for k, v in more.items()}}.items():
        message.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    if served:
        message.metadata_context.filter_metadata[NAMESPACE].update({SERVED: served})
    return message


def kinds(answers: Sequence[Response]) -> list[str]:
    return [answer.WhichOneof("response") or "" for answer in answers]


def set_by(answer: Response) -> dict[str, str]:
    """Headers that an answer sets, each in place of what was there."""
    part = getattr(answer, answer.WhichOneof("response") or "")
    mutation = part.headers if answer.HasField("immediate_response") else part.response.header_mutation
    assert all(option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD for option in mutation.set_headers)
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def sent_on(answers: Sequence[Response]) -> tuple[bytes, list[bool]]:
    """Body that the router gets, and which chunk ends it."""
    parts = [a.request_body.response.body_mutation.streamed_response for a in answers if a.HasField("request_body")]
    return b"".join(part.body for part in parts), [part.end_of_stream for part in parts]


def test_headers_are_answered_at_once_where_the_body_says_nothing_of_use() -> None:
    it = exchange(Choice(["10.0.0.1:80", "10.0.0.2:80"]), ReadingRules())
    [answer] = it.on(headers())
    where = "10.0.0.1:80,10.0.0.2:80"
    assert set_by(answer) == {DESTINATION: where}
    assert answer.dynamic_metadata[NAMESPACE][DESTINATION] == where, "header and metadata are the same"
    assert answer.request_headers.response.clear_route_cache
    assert sent_on(it.on(body(b"ab"))) == (b"ab", [False])
    assert sent_on(it.on(body(b"c", ends=True))) == (b"c", [True])
    assert kinds(it.on(answer_headers())) == ["response_headers"]
    [chunk] = it.on(body(b"text", answer=True))
    assert chunk.response_body.response.body_mutation.streamed_response.body == b"text"
    [last] = it.on(body(b"", ends=True, answer=True))
    assert last.response_body.response.body_mutation.streamed_response.end_of_stream
    assert not it.is_over


def test_trailers_pass() -> None:
    it = exchange(rules=ReadingRules())
    it.on(headers())
    for kind in ("request_trailers", "response_headers", "response_trailers"):
        message = Request()
        getattr(message, kind).SetInParent()
        assert kinds(it.on(message)) == [kind]


@pytest.mark.parametrize("size", [0, 1, 62_000, 62_001, 150_000])
def test_a_kept_body_is_sent_on_whole_after_the_headers(size: int) -> None:
    data = random.Random(size).randbytes(size)
    it = exchange()
    assert it.on(headers("/v1/responses?x=1")) == []
    assert it.is_choosing
    chunks = [data[i : i + 50_000] for i in range(0, size, 50_000)]
    for chunk in chunks:
        assert it.on(body(chunk)) == []
    answers = it.on(body(b"", ends=True))
    assert kinds(answers)[0] == "request_headers"
    whole, ends = sent_on(answers)
    assert (whole, ends) == (data, [False] * (len(ends) - 1) + [True])
    assert all(len(a.request_body.response.body_mutation.streamed_response.body) <= 64 << 10 for a in answers)
    assert "content-length" not in set_by(answers[0]), "it is as it was"


def test_a_kept_body_may_end_with_trailers() -> None:
    it = exchange()
    it.on(headers("/v1/responses"))
    it.on(body(b"{}"))
    message = Request()
    message.request_trailers.SetInParent()
    answers = it.on(message)
    assert kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert sent_on(answers) == (b"{}", [False])


def test_what_a_request_refers_to_is_read_from_path_and_body() -> None:
    choice = Choice()
    exchange(choice).on(headers("/v1/responses/resp_abc/cancel", ends=True))
    exchange(choice).on(headers("/v1/responses/resp_def?x", "GET", ends=True))
    it = exchange(choice)
    it.on(headers("/v1/responses", idempotency_key="k"))
    it.on(body(b'{"previous_response_id": "resp_123", "input": "a"}', ends=True))
    assert [(head.key, call) for head, _, call in choice.asked] == [("", "abc"), ("", "def"), ("k", "123")]
    it = exchange(choice)
    it.on(headers("/v1/responses/resp_abc/cancel"))
    it.on(body(b"{}", ends=True))
    assert choice.asked[-1][2] == "abc", "also where a body is kept for its model's name"
    # What the router refuses is passed on to it.
    for odd in (b"", b"[", b"[1]", b'{"previous_response_id": 7}', b"[" * 100_000, b"\xff\xfe", b"1" * 5000):
        it = exchange(choice)
        it.on(headers("/v1/responses"))
        assert sent_on(it.on(body(odd, ends=True)))[0] == odd
        assert choice.asked[-1][2] == ""


def test_the_models_name_is_changed_and_nothing_else() -> None:
    fields = {
        "model": "public",
        "prompt": "ü\u2028",
        "n": 12345678901234567890,
        "t": 0.1,
        "nested": {"model": "public"},
    }
    for given, more, wanted in (
        ("public", {}, "served"),
        ("other", {"x_gateway_model_name_rewrite": "served"}, "served"),
        ("public", {"x_gateway_model_name_rewrite": "asked"}, "asked"),
    ):
        it = exchange()
        it.on(headers(**more))
        answers = it.on(body(json.dumps(fields | {"model": given}).encode(), ends=True))
        whole, _ = sent_on(answers)
        assert json.loads(whole) == fields | {"model": wanted}
        assert set_by(answers[0])["content-length"] == str(len(whole))
    it = exchange()
    it.on(headers())
    same = json.dumps(fields | {"model": "served"}, indent=1).encode()
    answers = it.on(body(same, ends=True))
    assert sent_on(answers)[0] == same
    it = exchange()
    it.on(headers(x_gateway_model_name_rewrite="served"))
    [refused] = it.on(body(b"no JSON", ends=True))
    assert refused.immediate_response.status.code == 400


def test_a_body_is_kept_no_longer_than_until_it_says_what_it_continues() -> None:
    choice = Choice()
    it = exchange(choice, ReadingRules())
    it.on(headers("/v1/responses"))
    assert it.on(body(b'{"previous_response_id": "resp_12')) == []
    answers = it.on(body(b'3", "input": "'))
    assert sent_on(answers) == (b'{"previous_response_id": "resp_123", "input": "', [False])
    assert (choice.asked[0][2], it.is_choosing) == ("123", False)
    assert sent_on(it.on(body(b'a"}', ends=True))) == (b'a"}', [True])


def test_clients_do_not_rename_models_unless_the_picker_is_told_so() -> None:
    it = exchange(rules=ReadingRules())
    assert kinds(it.on(headers(x_gateway_model_name_rewrite="served"))) == ["request_headers"], "nothing is kept"
    assert not it.is_choosing


def test_gzip_bodies_are_read_and_changed_ones_are_sent_plain() -> None:
    choice = Choice()
    data = b'{"model": "public", "previous_response_id": "resp_123"}'
    for sent, wanted in (
        (gzip.compress(data), data.replace(b"public", b"served")),
        (gzip.compress(data.replace(b"public", b"other")), None),
        (data, None),
    ):
        it = exchange(choice)
        it.on(headers("/v1/responses", content_encoding="GZIP"))
        answers = it.on(body(sent, ends=True))
        assert sent_on(answers)[0] == (wanted or sent)
        mutation = answers[0].request_headers.response.header_mutation
        assert list(mutation.remove_headers) == (["content-encoding"] if wanted else [])
        assert set_by(answers[0]).get("content-length") == (str(len(wanted)) if wanted else None)
    assert [call for _, _, call in choice.asked] == ["123", "123", ""]
    it = exchange()
    it.on(headers(content_encoding="gzip"))
    [refused] = it.on(body(gzip.compress(b" " * (MAX_BYTES + 1)), ends=True))
    assert refused.immediate_response.status.code == 413


def test_requests_that_compute_are_told_apart() -> None:
    choice = Choice()
    computing = ("/v1/completions", "/v1/chat/completions", "/v1/messages?beta=true", "/v1/embeddings", "/v1/responses")
    other = ("/tokenize", "/v1/responses/resp_1/cancel", "/v1/messages/count_tokens", "/v1/models")
    for path in (*computing, *other):
        exchange(choice).on(headers(path, ends=True))
    exchange(choice).on(headers("/v1/responses", "GET", ends=True))
    assert [head.computes for head, _, _ in choice.asked] == [True] * 5 + [False] * 5


@pytest.mark.parametrize("mode", [MODES.NONE, MODES.STREAMED, MODES.BUFFERED, MODES.BUFFERED_PARTIAL])
def test_other_modes_get_one_answer_to_each_message(mode: int) -> None:
    it = exchange()
    message = headers("/v1/responses")
    message.protocol_config.request_body_mode = message.protocol_config.response_body_mode = mode  # type: ignore[assignment]
    assert kinds(it.on(message)) == ["request_headers"], "the body is not waited for"
    for sent, kind in ((body(b"a"), "request_body"), (body(b"b", answer=True), "response_body")):
        [answer] = it.on(sent)
        assert answer == Response(**{kind: {}}), "nothing changes"


def test_an_observer_is_not_answered() -> None:
    choice = Choice()
    message = headers()
    message.observability_mode = True
    it = exchange(choice, ReadingRules())
    assert it.on(message) == []
    assert it.on(body(b"a", ends=True)) == []
    assert len(choice.asked) == 1


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["10.0.0.1:80", "10.0.0.2:80"], {"10.0.0.1:80", "10.0.0.2:80"}),
        (["10.0.0.1:80, 10.0.0.2:80"], {"10.0.0.1:80", "10.0.0.2:80"}),
        ("10.0.0.1:80,10.0.0.2:80", {"10.0.0.1:80", "10.0.0.2:80"}),
        ([], set()),
        ("", set()),
    ],
)
def test_the_subset_is_read(given: object, found: set[str]) -> None:
    choice = Choice()
    message = headers()
    message.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET: given})
    exchange(choice, ReadingRules()).on(message)
    assert choice.asked[0][1] == found
    exchange(choice, ReadingRules()).on(headers())
    assert choice.asked[1][1] is None


def test_levels_and_objectives_are_read_and_sheddable_ones_are_marked() -> None:
    choice = Choice()

    def ask(**more: str) -> tuple[RequestHead, dict[str, str]]:
        [answer] = exchange(choice, ReadingRules(RULES.objectives)).on(headers(ends=True, **more))
        return choice.asked[-1][0], set_by(answer)

    head, given = ask()
    assert (head.ttft_s, head.is_sheddable, given) == (None, False, {DESTINATION: "10.0.0.1:80"})
    head, given = ask(x_gateway_inference_objective="batch")
    assert (head.is_sheddable, given["x-diptych-admission"]) == (True, "refuse")
    for other in ("chat", "unknown"):
        assert not ask(x_gateway_inference_objective=other)[0].is_sheddable
    head, _ = ask(x_gateway_inference_objective="batch", x_diptych_admission="wait")
    assert not head.is_sheddable, "its own word counts"
    head, _ = ask(x_diptych_admission="refuse", x_diptych_ttft_ms="250")
    assert head.ttft_s == 0.25
    assert ask(x_diptych_ttft_ms="250")[0].ttft_s is None, "it waits"
    assert ask(x_diptych_admission="refuse", x_diptych_ttft_ms="-1")[0].ttft_s is None, "the router says what is wrong"


def refusal_of(error: DiptychError, path: str = "/v1/completions") -> tuple[int, dict[str, str], dict[str, Any]]:
    choice = Choice()
    choice.error = error
    it = exchange(choice, ReadingRules())
    [answer] = it.on(headers(path))
    assert it.is_over
    assert it.on(body(b"a", ends=True)) == [], "nothing follows"
    found = answer.immediate_response
    assert not answer.HasField("dynamic_metadata")
    return found.status.code, set_by(answer), json.loads(found.body)


def test_refusals_are_those_of_a_router() -> None:
    status, given, found = refusal_of(Unavailable("no router is ready"))
    assert (status, found["error"]["code"]) == (503, "service_unavailable")
    assert given["content-type"] == "application/json"
    assert given["x-request-id"] in found["error"]["message"]
    status, given, found = refusal_of(Overloaded("full", retry_after_s=2.1, retry_helps=False))
    assert (status, given["retry-after"], given["x-should-retry"]) == (429, "3", "false")
    status, _, found = refusal_of(Overloaded("full"), "/v1/messages?beta=true")
    assert (status, found["type"], found["error"]["type"]) == (429, "error", "rate_limit_error")


def test_a_body_that_is_too_large_is_refused_before_it_has_come_whole() -> None:
    it = exchange()
    it.on(headers("/v1/responses"))
    answers = list(itertools.chain.from_iterable(it.on(body(b"x" * 50_000)) for _ in range(9)))
    assert [a.immediate_response.status.code for a in answers] == [413]
    assert it.is_over


def test_all_kept_bodies_together_have_a_limit() -> None:
    quota = Quota(240_000, "other bodies are being read")
    with quota.share() as one, quota.share() as two:
        first, second = Exchange(Choice(), RULES, one, MAX_BYTES), Exchange(Choice(), RULES, two, MAX_BYTES)
        first.on(headers("/v1/responses"))
        second.on(headers("/v1/responses"))
        assert first.on(body(b"x" * 60_000)) == []
        [refused] = second.on(body(b"x" * 60_000))
        assert refused.immediate_response.status.code == 429
    assert quota.num_held == 0


def test_large_bodies_that_do_not_end_leave_room_for_small_ones() -> None:
    quota = Quota(64 << 20, "other bodies are being read")
    with ExitStack() as stack:

        def kept(size: int) -> bool:
            it = Exchange(Choice(), RULES, stack.enter_context(quota.share()), 8 << 20)
            it.on(headers("/v1/responses"))
            piece = b"x" * min(size, 1 << 20)
            return not any(it.on(body(piece)) for _ in range(size // len(piece)))

        assert kept(8 << 20), "alone, it may be as large as bodies may be"
        assert not all(kept(8 << 20) for _ in range(100))
        assert all(kept(64 << 10) for _ in range(100))


def test_a_body_that_does_not_end_is_refused() -> None:
    it = exchange()
    it.on(headers("/v1/responses"))
    [answer] = it.on_slow_body()
    assert (answer.immediate_response.status.code, it.is_over) == (408, True)


def test_routers_are_doubted_that_did_not_take_a_request() -> None:
    def after(message: Request) -> list[str]:
        choice = Choice(["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"])
        it = exchange(choice, ReadingRules())
        it.on(headers(ends=True))
        assert kinds(it.on(message)) == ["response_headers"]
        return choice.doubted

    assert after(answer_headers(served="10.0.0.1:80")) == []
    assert after(answer_headers(served="10.0.0.3:80")) == ["10.0.0.1:80", "10.0.0.2:80"]
    assert after(answer_headers("503")) == ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"], "the proxy's own answer"
    assert after(answer_headers("503", x_request_id="req-0a")) == [], "a router's own"
    assert after(answer_headers("400")) == []


def test_what_no_envoy_sends_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="no part"):
        exchange().on(Request())
    for early in (body(b"a"), body(b"a", answer=True)):
        with pytest.raises(InvalidRequest, match="before the headers"):
            exchange().on(early)
    it = exchange()
    it.on(headers("/v1/responses"))
    with pytest.raises(InvalidRequest, match="twice"):
        it.on(headers())
    it = exchange()
    it.on(headers("/v1/responses"))
    with pytest.raises(InvalidRequest, match="before the end"):
        it.on(body(b"a", answer=True))


def test_the_proxys_own_answer_passes_before_a_body_has_ended() -> None:
    choice = Choice()
    it = exchange(choice)
    it.on(headers("/v1/responses"))
    it.on(body(b'{"inp'))
    assert kinds(it.on(answer_headers("408"))) == ["response_headers"]
    [chunk] = it.on(body(b"timeout", ends=True, answer=True))
    assert chunk.response_body.response.body_mutation.streamed_response.body == b"timeout"
    assert (it.is_choosing, choice.asked, choice.doubted) == (False, [], [])


def test_an_answer_of_a_filter_before_the_picker_passes() -> None:
    it = exchange()
    message = answer_headers("401")
    message.protocol_config.response_body_mode = MODES.BUFFERED
    assert kinds(it.on(message)) == ["response_headers"]
    [answer] = it.on(body(b"no key", ends=True, answer=True))
    assert answer == Response(response_body={}), "its modes are known"
    with pytest.raises(InvalidRequest, match="twice"):
        it.on(headers())
