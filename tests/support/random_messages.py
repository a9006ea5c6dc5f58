"""Random protobuf messages: each field is absent, usual, extreme or one of the known values of its name."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

BITS = {Field.CPPTYPE_INT32: 31, Field.CPPTYPE_INT64: 63, Field.CPPTYPE_UINT32: 32, Field.CPPTYPE_UINT64: 64}
SIGNED = (Field.CPPTYPE_INT32, Field.CPPTYPE_INT64)
TEXTS = ("", "x", "a fox", "\0", "é" * 100, "y" * 5000, "127.0.0.1:1", "bfloat16", "float32", "grpc", "int8")
FLOATS = (0.0, 0.5, 1.0, -1.0, 1e-30, 1e30, float("inf"), float("nan"))


def random_message(random: Random, kind: type[Message], known: Mapping[str, Sequence[Any]], depth: int = 0) -> Any:
    """`known`: values by the names of fields, likelier than others."""
    message: Any = kind()
    chosen = {oneof.name: random.choice(oneof.fields).name for oneof in kind.DESCRIPTOR.oneofs}
    for field in kind.DESCRIPTOR.fields:
        rivals = field.containing_oneof
        if rivals is not None and len(rivals.fields) > 1:
            if chosen[rivals.name] != field.name:
                continue
        elif random.random() < (0.3 if depth < 3 else 0.7):
            continue
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            names = field.message_type.fields_by_name
            for _ in range(random.choice((0, 1, 3))):
                key = random_value(random, names["key"], known)
                getattr(message, field.name)[key] = random_value(random, names["value"], known)
        elif field.message_type is not None:
            inner = GetMessageClass(field.message_type)
            if field.is_repeated:
                made = [random_message(random, inner, known, depth + 1) for _ in range(random.choice((0, 1, 1, 3)))]
                getattr(message, field.name).extend(made)
            else:
                getattr(message, field.name).CopyFrom(random_message(random, inner, known, depth + 1))
        elif field.is_repeated:
            number = random.choice((0, 1, 2, 5, 40))
            getattr(message, field.name).extend(random_value(random, field, known) for _ in range(number))
        else:
            setattr(message, field.name, random_value(random, field, known))
    return message


def random_value(random: Random, field: Field, known: Mapping[str, Sequence[Any]]) -> Any:
    if field.name in known and random.random() < 0.8:
        value = random.choice(known[field.name])
        return value.encode() if field.type == Field.TYPE_BYTES else value
    match field.cpp_type:
        case Field.CPPTYPE_BOOL:
            return random.random() < 0.5
        case Field.CPPTYPE_ENUM:
            return random.choice([value.number for value in field.enum_type.values] + [77])
        case Field.CPPTYPE_FLOAT | Field.CPPTYPE_DOUBLE:
            return random.choice(FLOATS)
        case Field.CPPTYPE_STRING:
            text = random.choice(TEXTS)
            return text.encode() if field.type == Field.TYPE_BYTES else text
        case kind:
            most = (1 << BITS[kind]) - 1
            least = -most - 1 if kind in SIGNED else 0
            return random.choice((0, 1, 2, random.randrange(64), random.randrange(1024), most, least))
