"""Keys that clients give to answers, and what follows from them."""

from collections.abc import Mapping

import pytest

from diptych.cluster.front.retries.answer_key import KEY_HEADER, MAX_KEY_CHARS, SEEN_HEADER, AnswerKey, key_of
from diptych.cluster.front.retries.event_ids import EventIds
from diptych.cluster.front.retries.ids import IdSource
from diptych.workers.common.errors import InvalidRequest

BODY = b'{"prompt":"a"}'


def found(headers: Mapping[str, str], owner: str = "", path: str = "/v1/completions", body: bytes = BODY) -> AnswerKey:
    key = key_of(headers, owner, path, body)
    assert key is not None
    return key


def test_the_key_of_a_call() -> None:
    assert key_of({}, "", "/v1/completions", BODY) is None
    plain = found({KEY_HEADER: "8e03978e-40d5"})
    assert plain == found({KEY_HEADER: '"8e03978e-40d5"'}), "as the IETF's draft writes it, and as most clients do"
    assert found({KEY_HEADER: r'"a \"b\" \\"'}).digest == AnswerKey.of(r'a "b" \ '.strip(), "", b"").digest
    assert plain.num_seen == 0 and found({KEY_HEADER: "k", SEEN_HEADER: "12"}).num_seen == 12
    assert len(plain.name) == 32 and "8e03978e" not in repr(plain), "what is kept does not tell the key"


def test_all_that_is_drawn_follows_from_key_and_owner() -> None:
    first, again = found({KEY_HEADER: "k"}), found({KEY_HEADER: "k"}, body=b"{}")
    assert [first.seed(i) for i in range(3)] == [again.seed(i) for i in range(3)]
    assert len({first.seed(i) for i in range(3)}) == 3 and first.seed(0) < 1 << 64
    assert first.record(0).name == again.record(0).name != first.record(1).name
    assert first.record(0).call != again.record(0).call, "another body under the same key is noticed"
    assert found({KEY_HEADER: "k"}, path="/v1/messages").call != first.call
    other = found({KEY_HEADER: "k"}, owner="another tenant")
    assert (other.name, other.seed(0)) != (first.name, first.seed(0)) and other.record(0).name != first.record(0).name
    assert AnswerKey.of("b/c", "a", b"").digest != AnswerKey.of("c", "a/b", b"").digest


def test_a_call_is_all_of_its_parts() -> None:
    assert AnswerKey.of("k", "", b"ab", b"c") == AnswerKey.of("k", "", b"abc")
    key = AnswerKey.of("k", "", b"call", num_seen=3)
    one, other = key.also_of(b"one"), key.also_of(b"other")
    assert len({key.call, one.call, other.call}) == 3 and one == key.also_of(b"one")
    assert (one.digest, one.num_seen) == (key.digest, 3)


@pytest.mark.parametrize(
    "headers",
    [
        {KEY_HEADER: ""},
        {KEY_HEADER: '""'},
        {KEY_HEADER: "k" * (MAX_KEY_CHARS + 1)},
        {KEY_HEADER: "a b"},
        {KEY_HEADER: '"a'},
        {KEY_HEADER: "ä"},
        {SEEN_HEADER: "3"},
        {KEY_HEADER: "k", SEEN_HEADER: "-1"},
        {KEY_HEADER: "k", SEEN_HEADER: "1.5"},
        {KEY_HEADER: "k", SEEN_HEADER: "1" * 30},
    ],
)
def test_what_is_no_key_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        key_of(headers, "", "/v1/completions", BODY)


def test_ids_of_a_key_come_again_and_others_do_not() -> None:
    one, again, other, free = IdSource(b"k"), IdSource(b"k"), IdSource(b"l"), IdSource()
    drawn = [one.hex(12), one.letters(9), one.hex(12)]
    assert drawn == [again.hex(12), again.letters(9), again.hex(12)] and drawn[0] != drawn[2]
    assert len(drawn[0]) == 24 and len(drawn[1]) == 9 and drawn[1].isalnum()
    assert other.hex(12) != drawn[0] and free.hex(12) != free.hex(12)


def test_events_get_numbers_and_those_that_were_seen_are_left_out() -> None:
    sent = ["data: a\n\ndata: b\n\n", "", "event: e\ndata: c\n\n"]
    ids = EventIds(0)
    assert [ids.add_to(each) for each in sent] == [
        "id: 1\ndata: a\n\nid: 2\ndata: b\n\n",
        "",
        "id: 3\nevent: e\ndata: c\n\n",
    ]
    ids = EventIds(1)
    assert "".join(map(ids.add_to, sent)) == "id: 2\ndata: b\n\nid: 3\nevent: e\ndata: c\n\n"
    assert "".join(map(EventIds(9).add_to, sent)) == ""
