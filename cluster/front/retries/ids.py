"""Ids of the parts of an answer: calls of tools, items."""

import secrets
import string
from hashlib import blake2b

_LETTERS = string.ascii_letters + string.digits


class IdSource:
    """Source of ids: random ones, or those that follow from a key, in the order in which they are asked for."""

    def __init__(self, key: bytes = b"") -> None:
        """`key`: at most 64 bytes; empty: random ids."""
        self._key = key
        self._num = 0

    def hex(self, num_bytes: int) -> str:
        return self._bytes(num_bytes).hex()

    def letters(self, num: int) -> str:
        """Letters and digits."""
        return "".join(_LETTERS[byte % len(_LETTERS)] for byte in self._bytes(num))

    def _bytes(self, num: int) -> bytes:
        if not self._key:
            return secrets.token_bytes(num)
        self._num += 1
        return blake2b(b"id%d" % self._num, digest_size=num, key=self._key).digest()
