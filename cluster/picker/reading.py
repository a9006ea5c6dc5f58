"""Reads what a request asks of the picker from its headers and, where that is needed, from its body. Pure.

Nothing is refused here but what the picker was told to change and cannot: the router checks requests, and says what is
wrong with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from ...workers.common.errors import InvalidRequest
from ..front.http.level_headers import ADMISSION, level_of
from .body import renamed, with_model

RESPONSES = "/v1/responses"
RESPONSE_ID = "resp_"
COMPUTING = frozenset({RESPONSES, "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/embeddings"})
KEY, OBJECTIVE, REWRITE = "idempotency-key", "x-gateway-inference-objective", "x-gateway-model-name-rewrite"
MAX_KEY_CHARS = 256


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """Settings by which requests are read. `objectives`: priority of each InferenceObjective, by its name; below
    0: it may be shed. `rewrites`: name of a model that clients send -> one that the routers serve.
    `reads_rewrite_header`: the gateway sets the header REWRITE, and keeps clients from it."""

    objectives: Mapping[str, int] = field(default_factory=dict[str, int])
    rewrites: Mapping[str, str] = field(default_factory=dict[str, str])
    reads_rewrite_header: bool = False


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Facts in the headers of a request."""

    method: str
    path: str  # without its query
    key: str = ""
    ttft_s: float | None = None  # within which it gets its first token, or is refused; None: it waits
    is_sheddable: bool = False
    model: str = ""  # that a header asks to be put into the body; empty: none
    encoding: str = ""  # of the body; empty: none

    @property
    def call(self) -> str:
        """Id of the call that made the response that the path names; empty: it names none."""
        if not self.path.startswith(f"{RESPONSES}/"):
            return ""
        return self.path.removeprefix(f"{RESPONSES}/").partition("/")[0].removeprefix(RESPONSE_ID)

    @property
    def computes(self) -> bool:
        """Return whether a router counts it among the requests of which it takes so many."""
        return self.method == "POST" and self.path in COMPUTING

    @property
    def may_refer(self) -> bool:
        """Return whether the body may name a kept response."""
        return self.method == "POST" and self.path == RESPONSES


def read_head(raw: list[tuple[bytes, bytes]], rules: ReadingRules) -> RequestHead:
    headers = Headers(raw=raw)
    objective = rules.objectives.get(headers.get(OBJECTIVE, ""), 0)
    return RequestHead(
        method=headers.get(":method", ""),
        path=headers.get(":path", "").partition("?")[0],
        key=headers.get(KEY, "")[:MAX_KEY_CHARS],
        ttft_s=_ttft_s(headers),
        is_sheddable=objective < 0 and ADMISSION not in headers,
        model=headers.get(REWRITE, "") if rules.reads_rewrite_header else "",
        encoding=headers.get("content-encoding", "").strip().lower(),
    )


def _ttft_s(headers: Headers) -> float | None:
    """Time to first token that the request would rather be refused than miss. What its tier, or its model's name, asks
    for, the router knows."""
    try:
        asked = level_of(headers)
    except InvalidRequest:  # the router says so
        return None
    return asked.ttft_s if asked.admission == "refuse" else None


def new_model(head: RequestHead, rules: ReadingRules, body: bytes) -> bytes:
    """The body with the model's name that the routers serve; the same one where nothing is to change. Raises
    InvalidRequest where a header asks for a name and the body has no JSON object, BodyTooLarge."""
    if head.model:
        return with_model(body, head.model)
    return renamed(body, lambda name: rules.rewrites.get(name, name))
