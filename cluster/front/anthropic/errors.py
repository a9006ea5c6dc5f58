"""Errors of Anthropic's API: {"type": "error", "error": {type, message, details?}, "request_id"}."""

from ....workers.common.errors import DiptychError, ThreadsNotServed

PATH = "/v1/messages"  # of the calls whose errors have this form, and those below it
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_own(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def error_object(error: DiptychError, its_id: str, status: int | None = None) -> dict[str, object]:
    status = error.status if status is None else status
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    described: dict[str, object] = {"type": kind, "message": error.message}
    if isinstance(error, ThreadsNotServed):
        described["details"] = {"error_code": error.code}
    return {"type": "error", "error": described, "request_id": its_id}
