"""Messages of Envoy's external processing, as the endpoint picker reads and makes them. Pure.

Source: Envoy's envoy/service/ext_proc/v3/external_processor.proto; names of headers and metadata: the Gateway API
Inference Extension's proposal 004, "Endpoint Picker Protocol".
"""

import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeAlias

from google.protobuf import struct_pb2

from ...proto import envoy_base_pb2, envoy_ext_proc_pb2
from ...workers.common.errors import DiptychError, Overloaded
from ..front.anthropic import errors as anthropic
from ..front.http.errors import error_object

DESTINATION, SERVED = "x-gateway-destination-endpoint", "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
NAMESPACE, SUBSET_NAMESPACE = "envoy.lb", "envoy.lb.subset_hint"
# Envoys take at most 64 KiB in a chunk, and some proxies no more.
CHUNK_BYTES = 62_000
JSON_TYPE = "application/json"

Request: TypeAlias = envoy_ext_proc_pb2.ProcessingRequest
Response: TypeAlias = envoy_ext_proc_pb2.ProcessingResponse
_OVERWRITE = envoy_base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def read_headers(found: envoy_ext_proc_pb2.HttpHeaders) -> list[tuple[bytes, bytes]]:
    """Names, in lower case, and values, in their order."""
    return [
        (each.key.lower().encode(), each.raw_value or each.value.encode(errors="replace"))
        for each in found.headers.headers
    ]


def subset_of(message: Request) -> frozenset[str] | None:
    """Endpoints that the proxy allows; None: it does not say. Proxies give a list, or a text with commas."""
    fields = _metadata(message, SUBSET_NAMESPACE)
    if SUBSET not in fields:
        return None
    given = fields[SUBSET]
    texts = [value.string_value for value in given.list_value.values] or [given.string_value]
    return frozenset(part.strip() for text in texts for part in text.split(",") if part.strip())


def served_by(message: Request) -> str:
    """Endpoint that answered, where the proxy says so."""
    fields = _metadata(message, NAMESPACE)
    return fields[SERVED].string_value if SERVED in fields else ""


def _metadata(message: Request, namespace: str) -> Mapping[str, struct_pb2.Value]:
    found = message.metadata_context.filter_metadata
    return found[namespace].fields if namespace in found else {}


def destination(endpoints: Sequence[str], headers: Mapping[str, str], removed: Sequence[str] = ()) -> Response:
    """Answer to the request's headers: where it goes, and headers to set and to remove."""
    where = ",".join(endpoints)
    made = Response()
    response = made.request_headers.response
    response.clear_route_cache = True
    response.header_mutation.CopyFrom(_set_headers({DESTINATION: where, **headers}))
    response.header_mutation.remove_headers.extend(removed)
    made.dynamic_metadata.update({NAMESPACE: {DESTINATION: where}})
    return made


def request_body(body: bytes, *, ends: bool) -> Iterator[Response]:
    """Chunks of the request's body; `ends`: no trailers follow."""
    for first in range(0, max(len(body), 1), CHUNK_BYTES):
        made = Response()
        streamed = made.request_body.response.body_mutation.streamed_response
        streamed.body = body[first : first + CHUNK_BYTES]
        streamed.end_of_stream = ends and first + CHUNK_BYTES >= len(body)
        yield made


def same_body(given: envoy_ext_proc_pb2.HttpBody, *, is_answer: bool) -> Response:
    """The chunk again: in full-duplex streaming, what is not sent back is left out."""
    made = Response()
    body = made.response_body if is_answer else made.request_body
    streamed = body.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = given.body, given.end_of_stream
    streamed.end_of_stream_without_message = given.end_of_stream_without_message
    streamed.grpc_message_compressed = given.grpc_message_compressed
    return made


def unchanged(kind: str) -> Response:
    """Answer to a message of that kind, the name of its field, that changes nothing."""
    made = Response()
    getattr(made, kind).SetInParent()
    return made


def refusal(error: DiptychError, path: str) -> Response:
    """Answer to the client in place of a router's, with the body and the headers that a router's would have."""
    its_id = f"req-{secrets.token_hex(16)}"
    headers = {"content-type": JSON_TYPE, "x-request-id": its_id}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        if not error.retry_helps:
            headers["x-should-retry"] = "false"
    shape = anthropic.error_object if anthropic.is_own(path) else error_object
    made = Response()
    answer = made.immediate_response
    code: Any = HTTPStatus(error.status).value  # the enumeration is open
    answer.status.code = code
    answer.headers.CopyFrom(_set_headers(headers))
    answer.body = json.dumps(shape(error, its_id)).encode()
    answer.details = f"diptych_{error.code}"
    return made


def _set_headers(headers: Mapping[str, str]) -> envoy_ext_proc_pb2.HeaderMutation:
    mutation = envoy_ext_proc_pb2.HeaderMutation()
    for name, value in headers.items():
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = name, value.encode()
    return mutation
