"""Key of an answer that a client may ask for again, at any router: the header Idempotency-Key.

The key decides all that is drawn at random in an answer: seeds, ids. So every router makes the same answer to the same
call, and none has to know another. docs/router.md describes what a client does.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from ....workers.common.errors import InvalidRequest
from ....workers.common.request import RECORD_BYTES, RecordKey

KEY_HEADER, SEEN_HEADER = "idempotency-key", "last-event-id"
MAX_KEY_CHARS = 255
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')  # a string of RFC 8941, as the IETF's draft has the header
_PLAIN = re.compile(r"[!#-~]*")
MAX_DIGITS = 18  # of a number of events


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """`digest`: of the client's key and of its owner; `call`: of what was asked for; `num_seen`: events of the answer
    that the client has already."""

    digest: bytes
    call: bytes
    num_seen: int = 0

    @classmethod
    def of(cls, key: str, owner: str, *call: bytes, num_seen: int = 0) -> "AnswerKey":
        """`owner`: name of the API key; `call`: bytes of all that the answer depends on, in parts. Raises
        InvalidRequest."""
        if not 0 < len(key) <= MAX_KEY_CHARS:
            raise InvalidRequest(f"an Idempotency-Key has 1 to {MAX_KEY_CHARS} characters", param=KEY_HEADER)
        named = b"%d/%b/%b" % (len(owner.encode()), owner.encode(), key.encode())
        digest = blake2b(named, digest_size=32, person=b"answer key").digest()
        return cls(digest, _digest(call), num_seen)

    def also_of(self, *call: bytes) -> "AnswerKey":
        """Return the same key for a call that depends on more than its own bytes."""
        return replace(self, call=_digest((self.call, *call)))

    @property
    def name(self) -> str:
        """Name of the answer, for its id: 32 hexadecimal digits."""
        return self._drawn(b"name", 16).hex()

    def seed(self, index: int) -> int:
        """Seed of the prompt whose first completion is number `index`. uint64."""
        return int.from_bytes(self._drawn(b"seed%d" % index, 8), "little")

    def record(self, index: int) -> RecordKey:
        """Name under which workers record completion number `index`."""
        return RecordKey(self._drawn(b"record%d" % index, RECORD_BYTES), self.call)

    def _drawn(self, what: bytes, size: int) -> bytes:
        return blake2b(what, digest_size=size, key=self.digest).digest()


def key_of(headers: Mapping[str, str], owner: str, path: str, body: bytes) -> AnswerKey | None:
    """Key of an HTTP call; None: it has none. Raises InvalidRequest."""
    given, seen = headers.get(KEY_HEADER), headers.get(SEEN_HEADER)
    if given is None:
        if seen is not None:
            raise InvalidRequest("Last-Event-ID needs the Idempotency-Key of the call that it continues")
        return None
    if quoted := _QUOTED.fullmatch(given):
        key = re.sub(r"\\(.)", r"\1", quoted[1])
    elif _PLAIN.fullmatch(given):
        key = given
    else:
        raise InvalidRequest("an Idempotency-Key has visible ASCII characters, or is a quoted string", param=KEY_HEADER)
    return AnswerKey.of(key, owner, path.encode() + b"\n", body, num_seen=_num_seen(seen))


def _digest(call: Iterable[bytes]) -> bytes:
    """Digest of a call's parts, one after another: a copy of a large body would take longer."""
    digest = blake2b(digest_size=RECORD_BYTES, person=b"call")
    for part in call:
        digest.update(part)
    return digest.digest()


def _num_seen(given: str | None) -> int:
    if not given:
        return 0
    if not (given.isascii() and given.isdecimal() and len(given) <= MAX_DIGITS):
        raise InvalidRequest("Last-Event-ID is the id of an event of this answer: a number", param=SEEN_HEADER)
    return int(given)
