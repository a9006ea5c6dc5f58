"""Ids and names that other processes send: their lengths are bounded where they are received, before they are kept."""

from typing import TypeAlias

from ...proto import kv_pb2
from .errors import DiptychError, HandoffError

MAX_CHARS = 256
MAX_TRANSPORTS = 16

FromSink: TypeAlias = (
    kv_pb2.SubscribeRequest | kv_pb2.PullRequest | kv_pb2.RenewRequest | kv_pb2.ReleaseRequest | kv_pb2.AbandonRequest
)


def check_lengths(error: type[DiptychError], **names: str) -> None:
    """Raise `error` for a name that is too long."""
    for what, name in names.items():
        if len(name) > MAX_CHARS:
            raise error(f"{what} has {len(name):,} characters; at most {MAX_CHARS}")


def check_sink(request: FromSink) -> None:
    """Raise HandoffError for ids that are too long."""
    check_lengths(HandoffError, handoff_id=request.handoff_id, sink_incarnation=request.sink_incarnation)


def check_subscription(request: kv_pb2.SubscribeRequest) -> None:
    """Raise HandoffError for names that are too long or too many."""
    check_sink(request)
    check_lengths(
        HandoffError,
        source_incarnation=request.source_incarnation,
        wire_dtype=request.wire_dtype,
        machine=request.machine,
    )
    if len(request.transports) > MAX_TRANSPORTS:
        raise HandoffError(f"the sink names {len(request.transports):,} transports; at most {MAX_TRANSPORTS}")
    for name in request.transports:
        check_lengths(HandoffError, transport=name)
