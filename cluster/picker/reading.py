"""Reads what a request asks of the picker from its headers and, where that is needed, from its body. Pure.

Nothing is refused here but what the picker was told to change and cannot: the router checks requests, and says what is
wrong with them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers

from ...workers.common.errors import InvalidRequest
from ..front.http.level_headers import ADMISSION, level_of

RESPONSES = "/v1/responses"
RESPONSE_ID = "resp_"
KEY, OBJECTIVE, REWRITE = "idempotency-key", "x-gateway-inference-objective", "x-gateway-model-name-rewrite"
MAX_KEY_CHARS = 256


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """Settings by which requests are read. `objectives`: priority of each InferenceObjective, by its name; below
    0: it may be shed. `rewrites`: name of a model that clients send -> one that the routers serve."""

    objectives: Mapping[str, int] = field(default_factory=dict[str, int])
    rewrites: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Facts in the headers of a request."""

    method: str
    path: str  # without its query
    key: str = ""
    ttft_s: float | None = None  # within which it gets its first token, or is refused; None: it waits
    is_sheddable: bool = False
    model: str = ""  # that a header asks to be put into the body; empty: none

    @property
    def call(self) -> str:
        """Id of the call that made the response that the path names; empty: it names none."""
        if not self.path.startswith(f"{RESPONSES}/"):
            return ""
        return self.path.removeprefix(f"{RESPONSES}/").partition("/")[0].removeprefix(RESPONSE_ID)

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
        model=headers.get(REWRITE, ""),
    )


def _ttft_s(headers: Headers) -> float | None:
    """Time to first token that the request would rather be refused than miss. What its tier, or its model's name, asks
    for, the router knows."""
    try:
        asked = level_of(headers)
    except InvalidRequest:  # the router says so
        return None
    return asked.ttft_s if asked.admission == "refuse" else None


@dataclass(frozen=True, slots=True)
class ReadBody:
    """Facts in the body of a request, and the body that is sent in its place."""

    body: bytes
    call: str = ""  # that made the response which it continues; empty: it continues none
    is_changed: bool = False


def read_body(body: bytes, head: RequestHead, rules: ReadingRules) -> ReadBody:
    """Raises InvalidRequest where the model's name is to be changed and the body has no JSON object."""
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        if head.model:
            raise InvalidRequest(
                f"the header {REWRITE} asks for another model's name in the body, which is no JSON object: send "
                "one, or leave the header out"
            )
        return ReadBody(body)
    fields: dict[str, Any] = found
    before = fields.get("previous_response_id")
    call = before.removeprefix(RESPONSE_ID) if head.may_refer and isinstance(before, str) else ""
    name = fields.get("model")
    wanted = head.model or (rules.rewrites.get(name, "") if isinstance(name, str) else "")
    if not wanted or wanted == name:
        return ReadBody(body, call)
    changed = json.dumps(fields | {"model": wanted}, separators=(",", ":"))
    return ReadBody(changed.encode(), call, is_changed=True)
