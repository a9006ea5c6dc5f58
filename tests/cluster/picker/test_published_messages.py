"""Our part of Envoy's messages against those that Envoy publishes, by another implementation of protobuf."""

import dataclasses
import warnings
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from diptych.cluster.picker.messages import DESTINATION, NAMESPACE, Response, destination, refusal, request_body
from diptych.proto import envoy_base_pb2, envoy_ext_proc_pb2, envoy_http_status_pb2, envoy_processing_mode_pb2
from diptych.workers.common.errors import Overloaded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of pydantic, about its validators
    from envoy_data_plane.envoy.config.core import v3 as core
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as filters
    from envoy_data_plane.envoy.service.ext_proc import v3 as published
    from envoy_data_plane.envoy.type import v3 as types

MODULES = (
    (envoy_base_pb2, core),
    (envoy_http_status_pb2, types),
    (envoy_processing_mode_pb2, filters),
    (envoy_ext_proc_pb2, published),
)
MESSAGES = [
    (message, there)
    for module, there in MODULES
    for top in module.DESCRIPTOR.message_types_by_name.values()
    for message in (top, *top.nested_types)
    if not message.GetOptions().map_entry
]
ENUMS = [
    (enum, there)
    for module, there in MODULES
    for enum in (
        *module.DESCRIPTOR.enum_types_by_name.values(),
        *(each for top in module.DESCRIPTOR.message_types_by_name.values() for each in top.enum_types),
    )
]
KINDS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_MESSAGE: "message",
    FieldDescriptor.TYPE_STRING: "string",
}


def name_there(descriptor: Descriptor | EnumDescriptor) -> str:
    """Name of the class: a nested one begins with those around it."""
    around = descriptor.containing_type
    return (name_there(around) if around is not None else "") + descriptor.name


@pytest.mark.parametrize(("message", "there"), MESSAGES, ids=lambda each: getattr(each, "full_name", ""))
def test_fields_have_the_published_names_numbers_and_types(message: Descriptor, there: Any) -> None:
    known = {
        field.name: field.metadata["betterproto"] for field in dataclasses.fields(getattr(there, name_there(message)))
    }
    for field in message.fields:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        found = known[field.name]
        assert (found.number, found.proto_type) == (field.number, "map" if is_map else KINDS[field.type]), field.name
        assert bool(found.group) == (field.containing_oneof is not None), field.name
        assert found.repeated == (field.is_repeated and not is_map), field.name


@pytest.mark.parametrize(("enum", "there"), ENUMS, ids=lambda each: getattr(each, "full_name", ""))
def test_values_have_the_published_numbers(enum: EnumDescriptor, there: Any) -> None:
    published_numbers = {int(value) for value in getattr(there, name_there(enum))}
    assert {value.number for value in enum.values} <= published_numbers


def test_the_service_is_the_published_one() -> None:
    [service] = envoy_ext_proc_pb2.DESCRIPTOR.services_by_name.values()
    assert service.full_name == "envoy.service.ext_proc.v3.ExternalProcessor"
    [method] = service.methods
    assert (method.name, method.client_streaming, method.server_streaming) == ("Process", True, True)


def as_published(message: Response) -> Any:
    return published.ProcessingResponse.parse(message.SerializeToString())


def test_what_the_picker_answers_means_the_same_there() -> None:
    found = as_published(destination(["10.0.0.1:80", "10.0.0.2:80"], {"content-length": "7"}))
    response = found.request_headers.response
    set_headers = {option.header.key: option.header.raw_value for option in response.header_mutation.set_headers}
    assert set_headers == {DESTINATION: b"10.0.0.1:80,10.0.0.2:80", "content-length": b"7"}
    assert found.dynamic_metadata.to_dict() == {NAMESPACE: {DESTINATION: "10.0.0.1:80,10.0.0.2:80"}}
    bodies = [as_published(each).request_body for each in request_body(b"a" * 99_999, ends=True)]
    chunks = [body.response.body_mutation.streamed_response for body in bodies]
    assert (b"".join(chunk.body for chunk in chunks), chunks[-1].end_of_stream) == (b"a" * 99_999, True)
    found = as_published(refusal(Overloaded("full", retry_after_s=2), "/v1/completions")).immediate_response
    assert (found.status.code, b"full" in found.body) == (types.StatusCode(429), True)
    assert {option.header.key: option.header.raw_value for option in found.headers.set_headers}["retry-after"] == b"2"
