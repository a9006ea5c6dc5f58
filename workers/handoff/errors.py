"""Converts what a source answers into a sink's errors. No torch."""

import grpc
import grpc.aio

from ...proto import kv_pb2
from ..common.channel import ERROR_KEY
from ..common.errors import (
    DeadlineExceeded,
    DiptychError,
    HandoffError,
    SequenceEnded,
    Unavailable,
    from_wire,
)
from ..common.tls import lost_peer
from .types import is_sequence_end


def error_of(e: grpc.aio.AioRpcError) -> DiptychError:
    """The error for a broken or refused subscription."""
    details = e.details() or e.code().name
    for key, value in e.trailing_metadata() or ():
        if key == ERROR_KEY:
            error = from_wire(value if isinstance(value, str) else value.decode(errors="replace"), details)
            return error if isinstance(error, HandoffError | Unavailable) else HandoffError(details)
    match e.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return lost_peer("the source worker cannot be reached", details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the KV had not arrived in time")
        case code:
            return HandoffError(f"the source refused the hand-off: {code.name} {details}")


def error_of_abort(message: kv_pb2.Aborted) -> DiptychError:
    """The error for a hand-off that the source gave up."""
    error = from_wire(message.error, message.message)
    if isinstance(error, HandoffError | Unavailable):
        return error
    kind = SequenceEnded if is_sequence_end(error) else HandoffError
    return kind(f"the source gave the hand-off up: {message.message}")
