"""HTTP answers of errors: OpenAI's object {"error": {message, type, param, code}}, or Anthropic's, by the path of the
call, and the status of its class.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....workers.common.errors import (
    DiptychError,
    InternalError,
    InvalidRequest,
    NotServed,
    Overloaded,
    UnsupportedEncoding,
)
from ..anthropic import errors as anthropic
from ..anthropic.format import to_event as messages_event
from ..openai.format import to_event

# Calls of OpenAI's and Anthropic's clients that are known and not served, by method and path, and what to do instead.
_NOT_SERVED = {
    ("POST", "/v1/responses/compact"): "no conversation is compacted. Send truncation: auto, which leaves the oldest "
    "turns out of the prompt where it would be too long, or begin a conversation with a summary of your own",
    ("POST", "/v1/conversations"): "there are no conversations beside responses. Send previous_response_id",
    ("POST", "/v1/batches"): "a batch file is run from the command line: diptych batch FILE",
    ("POST", "/v1/messages/batches"): "a batch file of chats is run from the command line: diptych batch FILE",
}


@contextmanager
def renaming(fields: Mapping[str, str]) -> Generator[None]:
    """Let errors name fields as the call did. `fields`: its names, by those that the front door has."""
    try:
        yield
    except InvalidRequest as e:
        if e.param is not None and e.param in fields:
            known, asked = e.param, fields[e.param]
            e.param = asked
            if e.message.startswith(known):
                e.message = asked + e.message.removeprefix(known)
        raise


def call_id(request: Request) -> str:
    return str(request.state.call_id)


def request_id(request: Request) -> str:
    return f"req-{call_id(request)}"


def error_object(error: DiptychError, its_id: str, status: int | None = None) -> dict[str, object]:
    """OpenAI's error object for `error`."""
    status = error.status if status is None else status
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": f"{error.message} (request id: {its_id})",
            "type": kind,
            "param": error.param,
            "code": None if error.code == kind else error.code,
        }
    }


def error_event(error: DiptychError, request: Request) -> str:
    """Event of an error in a stream that has begun."""
    if anthropic.is_own(request.url.path):
        return messages_event(anthropic.error_object(error, request_id(request)))
    return to_event(error_object(error, request_id(request)))


def error_response(error: DiptychError, request: Request, status: int | None = None) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        if not error.retry_helps:
            headers["x-should-retry"] = "false"  # OpenAI's clients try again otherwise
    if isinstance(error, UnsupportedEncoding):
        headers["accept-encoding"] = "gzip"
    shape = anthropic.error_object if anthropic.is_own(request.url.path) else error_object
    return JSONResponse(shape(error, request_id(request), status), status or error.status, headers)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, DiptychError)
    return error_response(error, request)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if (instead := _NOT_SERVED.get((request.method, request.url.path))) is not None:
        return error_response(NotServed(f"{request.method} {request.url.path} is not served: {instead}"), request)
    reason = HTTPStatus(error.status_code).phrase.lower()
    message = f"{reason}: {request.method} {request.url.path[:200]}. See GET /v1/models and POST /v1/chat/completions"
    response = error_response(InvalidRequest(message), request, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, _: Exception) -> Response:
    # Starlette raises it again after this answer, so that the server logs it.
    return error_response(InternalError("the server failed: please report this"), request)


EXCEPTION_HANDLERS = {DiptychError: _on_error, HTTPException: _on_http_error, Exception: _on_bug}
