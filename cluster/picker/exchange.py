"""One HTTP request and its answer, as an Envoy tells of them on one stream. Pure: message -> answers to it.

    headers ── nothing of the body is needed, or there is none ──> chosen: the answer to the headers names routers
       └── the body is needed: chunks are kept, until it names what it continues, or has ended
                                                            ──> chosen: headers, then the body, changed or not
    chosen ── the request's chunks and trailers pass, then the answer's headers, chunks and trailers
    none ready, shed, too large ──> ended, by an answer in place of a router's
    the proxy answers before the choice ──> chosen, though nothing was: the answer passes

In full-duplex streaming, what is not sent back is left out: chunks are sent back as they come. In Envoy's other modes
each message gets one answer that changes nothing, and headers are answered before the body comes: the body is not read.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Protocol

from ...proto import envoy_ext_proc_pb2, envoy_processing_mode_pb2
from ...workers.common.errors import BodyTooLarge, BodyTooSlow, DiptychError, InvalidRequest
from ..common.quota import QuotaShare
from ..front.http.level_headers import ADMISSION
from .body import GZIP, PLAIN, ReferenceFinder, inflated
from .messages import (
    Request,
    Response,
    destination,
    read_headers,
    refusal,
    request_body,
    same_body,
    served_by,
    subset_of,
    unchanged,
)
from .reading import ReadingRules, RequestHead, new_model, read_head

_MODES = envoy_processing_mode_pb2.ProcessingMode
DUPLEX = frozenset({_MODES.FULL_DUPLEX_STREAMED, _MODES.GRPC})
GATEWAY_ERRORS = frozenset({"502", "503", "504"})
MAX_PART = 1 / 3  # of the bytes that are free: what one body may have
OWN_ID = b"req-"  # begins the x-request-id of every answer of a router


class RouterChoice(Protocol):
    """Chooser of routers for requests, and hearer of what became of its choices."""

    def choose(self, head: RequestHead, subset: frozenset[str] | None, call: str) -> list[str]:
        """Endpoints, the best first. Raises Unavailable, Overloaded."""
        ...

    def doubt(self, endpoints: Sequence[str]) -> None:
        """Routers did not take a request that the proxy sent them."""
        ...


class _Phase(Enum):
    HEADERS = auto()
    BODY = auto()  # is kept
    CHOSEN = auto()
    ENDED = auto()


class Exchange:
    """`held`: of the bytes that all exchanges may keep; `max_bytes`: of one body."""

    def __init__(self, choice: RouterChoice, rules: ReadingRules, held: QuotaShare, max_bytes: int) -> None:
        self._choice = choice
        self._rules = rules
        self._held = held
        self._max_bytes = max_bytes
        self._phase = _Phase.HEADERS
        self._head = RequestHead("", "")
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self._finder: ReferenceFinder | None = None  # None: the body is not searched
        self._call = ""  # that made the response which path or body name, as far as is known
        self._changes_model = False
        self._endpoints: list[str] = []
        self._request_is_duplex = self._answer_is_duplex = True  # the protocol asks for it
        self._is_silent = False

    @property
    def is_choosing(self) -> bool:
        """Return whether what it reads may have to be kept."""
        return self._phase in (_Phase.HEADERS, _Phase.BODY)

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is to be answered."""
        return self._phase is _Phase.ENDED

    def on(self, message: Request) -> list[Response]:
        """Answers to a message. Raises InvalidRequest for one that no Envoy sends then."""
        kind = message.WhichOneof("request")
        if kind is None:
            raise InvalidRequest("the message has no part of a request or an answer: is the caller an Envoy?")
        try:
            answers = self._answers(kind, message)
        except _RefusedExchange as refused:
            self._end()
            answers = [refusal(refused.error, self._head.path)]
        return [] if self._is_silent else answers

    def on_slow_body(self) -> list[Response]:
        """Answer where the body has not ended in time."""
        self._end()
        error = BodyTooSlow("the body of the request did not come in time: send it faster, or less")
        return [] if self._is_silent else [refusal(error, self._head.path)]

    def _end(self) -> None:
        self._phase = _Phase.ENDED
        self._body.clear()

    def _answers(self, kind: str, message: Request) -> list[Response]:
        if kind == "request_headers":
            return self._on_request(message)
        if kind == "response_headers" and self.is_choosing:  # the proxy's own: a filter refused, a time limit passed
            self._read_modes(message)
            self._phase = _Phase.CHOSEN
            self._body.clear()
        match self._phase:
            case _Phase.HEADERS:
                raise InvalidRequest(f"{kind} came before the headers of the request: set request_header_mode to SEND")
            case _Phase.BODY:
                return self._on_kept(kind, message)
            case _Phase.CHOSEN:
                return [self._passed(kind, message)]
            case _Phase.ENDED:
                return []

    def _passed(self, kind: str, message: Request) -> Response:
        """Answer to what comes after the choice."""
        match kind:
            case "request_body":
                body = message.request_body
                return same_body(body, is_answer=False) if self._request_is_duplex else unchanged(kind)
            case "response_body":
                body = message.response_body
                return same_body(body, is_answer=True) if self._answer_is_duplex else unchanged(kind)
            case "response_headers":
                self._hear(message)
                return unchanged(kind)
            case _:  # trailers
                return unchanged(kind)

    def _on_request(self, message: Request) -> list[Response]:
        if self._phase is not _Phase.HEADERS:
            raise InvalidRequest("the headers of the request came twice: an Envoy opens a stream for each request")
        self._read_modes(message)
        found = message.request_headers
        self._head = head = read_head(read_headers(found), self._rules)
        self._subset, self._call = subset_of(message), head.call
        has_body = not found.end_of_stream and self._request_is_duplex
        self._changes_model = has_body and bool(head.model or (head.method == "POST" and self._rules.rewrites))
        if has_body and head.may_refer:
            self._finder = ReferenceFinder(head.encoding, self._max_bytes)
        if self._changes_model or self._finder is not None:
            self._phase = _Phase.BODY
            return []
        return [self._chosen()]

    def _read_modes(self, message: Request) -> None:
        """Read what the first message alone says."""
        if self._phase is not _Phase.HEADERS:
            return
        self._is_silent = message.observability_mode
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            self._request_is_duplex = modes.request_body_mode in DUPLEX
            self._answer_is_duplex = modes.response_body_mode in DUPLEX

    def _on_kept(self, kind: str, message: Request) -> list[Response]:
        if kind == "request_trailers":
            return [*self._whole(ends=False), unchanged(kind)]
        if kind != "request_body":
            raise InvalidRequest(f"{kind} came before the end of the request")
        ends = message.request_body.end_of_stream
        self._keep(message.request_body)
        return self._whole(ends=ends) if ends or (self._call and not self._changes_model) else []

    def _keep(self, chunk: envoy_ext_proc_pb2.HttpBody) -> None:
        if len(self._body) + len(chunk.body) > self._max_bytes:
            raise _RefusedExchange(BodyTooLarge(f"the body has more than {self._max_bytes} bytes: send less"))
        with _for_client():
            self._held.take_part(len(chunk.body), MAX_PART)
        self._body += chunk.body
        if self._finder is not None and not self._call:
            self._call = self._finder.find(chunk.body)

    def _whole(self, *, ends: bool) -> list[Response]:
        """Answers once enough of the body is there: it is sent on as far as it is."""
        body = bytes(self._body)
        self._body.clear()
        changed = self._changed(body) if self._changes_model else None
        chosen = self._chosen(changed)
        return [chosen, *request_body(body if changed is None else changed, ends=ends)]

    def _changed(self, body: bytes) -> bytes | None:
        """The body with another model's name, not compressed; None: it stays as it is."""
        with _for_client():
            plain = self._plain(body)
            changed = new_model(self._head, self._rules, plain)
        return None if changed == plain else changed

    def _plain(self, body: bytes) -> bytes:
        """The body without its compression; empty where that is not known: the router says so. Raises BodyTooLarge,
        Overloaded."""
        if self._head.encoding in PLAIN:
            return body
        if self._head.encoding not in GZIP:
            return b""
        found = inflated(body, self._max_bytes)
        self._held.take_part(len(found), MAX_PART)
        return found

    def _chosen(self, changed: bytes | None = None) -> Response:
        """`changed`: body in place of the client's."""
        with _for_client():
            self._endpoints = self._choice.choose(self._head, self._subset, self._call)
        self._phase = _Phase.CHOSEN
        headers: dict[str, str] = {}
        if self._head.is_sheddable:
            headers[ADMISSION] = "refuse"  # the router knows the prompt, and decides likewise
        if changed is None:
            return destination(self._endpoints, headers)
        headers["content-length"] = str(len(changed))
        return destination(self._endpoints, headers, ["content-encoding"] if self._head.encoding in GZIP else ())

    def _hear(self, message: Request) -> None:
        """Learn from the answer which routers did not take the request."""
        served = served_by(message)
        if served in self._endpoints:
            self._choice.doubt(self._endpoints[: self._endpoints.index(served)])
            return
        headers = dict(read_headers(message.response_headers))
        is_routers = headers.get(b"x-request-id", b"").startswith(OWN_ID)
        if not is_routers and headers.get(b":status", b"").decode(errors="replace") in GATEWAY_ERRORS:
            self._choice.doubt(self._endpoints)


class _RefusedExchange(Exception):
    """The client gets an error."""

    def __init__(self, error: DiptychError) -> None:
        super().__init__(error.message)
        self.error = error


@contextmanager
def _for_client() -> Generator[None]:
    """Errors that are raised within are the client's answer."""
    try:
        yield
    except DiptychError as error:
        raise _RefusedExchange(error) from error
