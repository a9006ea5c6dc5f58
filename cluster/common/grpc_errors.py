"""DiptychError <-> gRPC status. The status says what kind of error it is, the trailing metadata which one.

diptych-error        the exception's name in workers/common/errors.py        diptych-param   the field at fault, if any
diptych-request-id   the server's id of the call                      retry-after-s   seconds, where overloaded
"""

from collections.abc import Iterable

import grpc

from ...workers.common.channel import ERROR_KEY
from ...workers.common.errors import (
    DeadlineExceeded,
    DiptychError,
    HandoffError,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestAborted,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    from_wire,
)

REQUEST_ID_KEY = "diptych-request-id"
PARAM_KEY = "diptych-param"
RETRY_AFTER_KEY = "retry-after-s"
MAX_MESSAGE_CHARS = 2000  # it travels in a header, and peers bound those to 8 KiB

_STATUS = (
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RequestAborted, grpc.StatusCode.CANCELLED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (HandoffError, grpc.StatusCode.INTERNAL),
)
# Errors of the transport itself, for which no server named an error.
_BARE: dict[grpc.StatusCode, type[DiptychError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.CANCELLED: RequestAborted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}

Metadata = tuple[tuple[str, str], ...]


def status_of(error: DiptychError) -> grpc.StatusCode:
    return next((status for cls, status in _STATUS if isinstance(error, cls)), grpc.StatusCode.INTERNAL)


def trailing_metadata(error: DiptychError, request_id: str) -> Metadata:
    pairs = [(ERROR_KEY, type(error).__name__), (REQUEST_ID_KEY, request_id)]
    if error.param is not None:
        pairs.append((PARAM_KEY, error.param.encode("ascii", "replace").decode()[:200]))
    if isinstance(error, Overloaded):
        pairs.append((RETRY_AFTER_KEY, f"{error.retry_after_s:g}"))
    return tuple(pairs)


def error_from_rpc(
    code: grpc.StatusCode | None, details: str | None, metadata: Iterable[tuple[str, object]]
) -> DiptychError:
    """The error that ended a call, of the class that the server raised."""
    known = {key: value if isinstance(value, str) else "" for key, value in metadata}
    message = details or f"the call ended with {code}"
    if request_id := known.get(REQUEST_ID_KEY):
        message += f" (request id: {request_id})"
    if name := known.get(ERROR_KEY):
        error = from_wire(name, message)
    elif code is grpc.StatusCode.UNAVAILABLE:
        error = Unavailable(f"the server cannot be reached: {message}. Is it running at that address?")
    elif code in _BARE:
        error = _BARE[code](message)
    else:
        error = InternalError(message)
    error.param = known.get(PARAM_KEY)
    if isinstance(error, Overloaded):
        error.retry_after_s = _seconds(known.get(RETRY_AFTER_KEY)) or error.retry_after_s
    return error


def _seconds(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
