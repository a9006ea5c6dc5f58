"""What the picker reads and changes in bodies by their bytes, beside a parser of JSON."""

import gzip
import json
import random
import tracemalloc
from typing import Any

import pytest

from diptych.cluster.picker import body as bodies
from diptych.cluster.picker.body import ReferenceFinder, inflated, renamed, with_model
from diptych.workers.common.errors import BodyTooLarge, InvalidRequest

MAX_BYTES = 1 << 20
TEXTS = ('"', "\\", '\\"', '"model": "public"', "{", "]}", "model", "public", "ü", "\n", "x" * 50, "", "\\\\")


def in_chunks(data: bytes, size: int, encoding: str = "") -> str:
    finder = ReferenceFinder(encoding, MAX_BYTES)
    return next((found for i in range(0, len(data), size) if (found := finder.find(data[i : i + size]))), "")


@pytest.mark.parametrize("size", [1, 7, 100, 4096])
def test_a_reference_is_found_wherever_chunks_end(size: int) -> None:
    for odd in ("", " \n", "x" * 2000):
        data = json.dumps({"input": odd, "previous_response_id": "resp_0a1b", "n": 1}, indent=1).encode()
        assert in_chunks(data, size) == "0a1b"
        for encoding in ("gzip", "x-gzip"):
            assert in_chunks(gzip.compress(data), size, encoding) == "0a1b"


def test_text_and_nonsense_are_no_reference() -> None:
    within = {"input": '"previous_response_id": "resp_0a1b"', "previous_response_id": None}
    for data in (json.dumps(within).encode(), b'"previous_response_id": 7', b'"previous_response_id": "resp_', b"\xff"):
        assert in_chunks(data, 1000) == ""
    assert in_chunks(b"no gzip", 1000, "gzip") == ""


def test_a_gzip_body_is_searched_no_further_than_bodies_are_long() -> None:
    data = b" " * MAX_BYTES + b'{"previous_response_id": "resp_0a1b"}'
    assert in_chunks(gzip.compress(data[bodies.STEP_BYTES :]), 4096, "gzip") == "0a1b"
    assert in_chunks(gzip.compress(data + data), 4096, "gzip") == ""
    assert inflated(gzip.compress(data[-100:]), 100) == data[-100:]
    with pytest.raises(BodyTooLarge):
        inflated(gzip.compress(data[-101:]), 100)
    whole = gzip.compress(data)
    for wrong in (b"", data, whole[:-1], whole + whole):
        assert inflated(wrong, 2 * MAX_BYTES) == b""


def made(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(6 if depth < 3 else 3):
        case 0:
            return rng.choice(TEXTS)
        case 1:
            return rng.choice([0, -1.5e300, 12345678901234567890, True, None])
        case 2:
            return "".join(rng.choices(TEXTS, k=3))
        case 3:
            return [made(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            return {rng.choice([*TEXTS, "a", "b"]): made(rng, depth + 1) for _ in range(rng.randrange(5))}


@pytest.mark.parametrize("size", [1, 7, 100, 4096])
def test_the_reference_of_the_outermost_object_counts_alone(size: int) -> None:
    """Libraries send `metadata` before it, in which a client may have another."""
    rng, num_referring = random.Random(11), 0
    for _ in range(200):
        within = {rng.choice(TEXTS): made(rng), "previous_response_id": "resp_other", "n": made(rng)}
        parts = [("metadata", within), *((f"{rng.choice(TEXTS)}{i}", made(rng)) for i in range(3))]
        if is_there := rng.random() < 0.7:
            parts.append(("previous_response_id", "resp_0a1b"))
        rng.shuffle(parts)
        data = json.dumps(dict(parts), indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()
        wanted = "0a1b" if is_there else ""
        assert in_chunks(data, size) == in_chunks(gzip.compress(data), size, "gzip") == wanted, data
        num_referring += is_there
    assert 100 < num_referring < 200


def test_beyond_as_many_strings_as_are_looked_at_the_first_reference_counts() -> None:
    strings = b'"",' * (bodies.MAX_STRINGS - 3)  # beside three names of fields
    data = b'{"a":[' + strings + b'0],"b":{"previous_response_id":"resp_other"},"previous_response_id":"resp_0a1b"}'
    assert in_chunks(data, 4096) == "0a1b"
    assert in_chunks(data.replace(b"[", b'["","",', 1), 4096) == "other"


def test_of_a_body_the_name_of_the_outermost_object_changes_alone() -> None:
    rng, num_changed = random.Random(7), 0
    for _ in range(3000):
        fields = {rng.choice([*TEXTS, "a", "b", "model"]): made(rng) for _ in range(6)}
        if rng.random() < 0.1:
            fields[""] = {"model": fields.setdefault("model", "public")}
        text = json.dumps(fields, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()
        wanted = fields | ({"model": "served"} if fields.get("model") == "public" else {})
        found = renamed(text, lambda name: "served" if name == "public" else name)
        assert json.loads(found) == wanted, text
        assert (found == text) == (wanted == fields)
        num_changed += found != text
        assert json.loads(with_model(text, 'ano"ther')) == fields | {"model": 'ano"ther'} or not isinstance(
            fields.get("model", ""), str
        )
    assert num_changed > 50


def test_all_but_the_name_stays_byte_by_byte() -> None:
    text = b' {"t": 1.50e2,\r\n"model" :\t"p\\u0075blic", "t": {"model": "public"}} '
    found = renamed(text, {"public": "served"}.get)  # type: ignore[arg-type]
    assert found == text.replace(b'"p\\u0075blic"', b'"served"')
    assert with_model(b" { }", "a") == b' {"model":"a" }'
    assert with_model(b'{"n":1}', "a") == b'{"model":"a","n":1}'
    for wrong in (b"", b"[1]", b"no JSON", b'"{"'):
        with pytest.raises(InvalidRequest, match="no JSON object"):
            with_model(wrong, "a")


@pytest.mark.parametrize(
    "wrong", [b'{"model":', b'{"model":"', b'{"model":"\\', b'["model":"public"]', b'}{"model":"public"']
)
def test_what_is_no_json_is_left_to_the_router(wrong: bytes) -> None:
    assert renamed(wrong, lambda _: "served") == wrong


def test_bodies_of_too_many_strings_are_refused_where_a_name_may_change() -> None:
    most = b'{"a":[' + b'"",' * (bodies.MAX_STRINGS - 4) + b'""],"model":"public"}'
    assert renamed(most, lambda _: "served").endswith(b'"served"}')
    more = most.replace(b"[", b'["",')
    with pytest.raises(BodyTooLarge, match="strings"):
        renamed(more, lambda _: "served")
    assert renamed(more.replace(b'"model"', b'"m"'), lambda _: "served"), "it has no name"
    escaped = b'{"model":"' + b'\\"' * 2 * bodies.MAX_STRINGS + b'"}'
    with pytest.raises(BodyTooLarge, match="strings"):
        renamed(escaped, lambda _: "served")


def test_memory_is_for_the_bytes_of_a_body_alone() -> None:
    """Parsed, each of these objects would have 64 bytes for its 3."""
    data = b'{"x":[' + b"{}," * (MAX_BYTES // 3) + b'{}],"model":"public"}'
    tracemalloc.start()
    try:
        assert renamed(data, lambda _: "served").endswith(b'"served"}')
        assert in_chunks(data, 64 << 10) == ""
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data)
    finally:
        tracemalloc.stop()
