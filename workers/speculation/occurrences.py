"""Occurrences: the places in a growing text where each of its n-grams ended, newest first.

Hash chains, as LZ77 coders have them (zlib's deflate): a dict leads from an n-gram's key to its newest place, an array
from each place to the one before it with the same key. One dict insert and one array entry a token; long pieces of
text are sorted by numpy instead, several times as fast. Memory: about 150 bytes for each n-gram that differs from all
others, 4 for each repetition. Two n-grams may share a key, so whoever asks compares the tokens.
"""

from array import array
from collections.abc import Sequence as SequenceOf

import numpy as np

NOWHERE = -1
LONG = 48  # tokens: more are sorted
BITS = 21  # of a token id in a key: three of them have no sign
LARGEST_ORDER = 3


class Occurrences:
    """Places of n-grams of `order` tokens in one text. A place is the number of tokens up to an n-gram's end, which is
    the position of the token that followed it."""

    __slots__ = ("_mask", "_newest", "_older", "order")

    def __init__(self, order: int) -> None:
        assert order <= LARGEST_ORDER
        self.order = order
        self._mask = (1 << BITS * order) - 1
        self._newest: dict[int, int] = {}
        self._older = array("i", [NOWHERE]) * order  # by place

    @property
    def num_places(self) -> int:
        """Length of the text as far as its n-grams are known."""
        return len(self._older) - 1

    def extend(self, token_ids: SequenceOf[int], end: int) -> None:
        """Add the n-grams of the text that end at `end` or before and are not known yet."""
        begin = len(self._older)
        if end - begin >= LONG:
            self._extend_sorted(token_ids, begin, end)
            return
        newest, older, mask = self._newest, self._older, self._mask
        key = key_of(token_ids[begin - self.order : begin - 1])
        for place in range(begin, end + 1):
            key = (key << BITS ^ token_ids[place - 1]) & mask
            older.append(newest.get(key, NOWHERE))
            newest[key] = place

    def find(self, last_ids: SequenceOf[int], most: int) -> list[int]:
        """Return at most `most` places of the n-gram `last_ids`, newest first, and perhaps of others."""
        place = self._newest.get(key_of(last_ids) & self._mask, NOWHERE)
        if place == NOWHERE:
            return []
        places, older = [place], self._older
        while len(places) < most and (place := older[place]) != NOWHERE:
            places.append(place)
        return places

    def _extend_sorted(self, token_ids: SequenceOf[int], begin: int, end: int) -> None:
        piece = np.array(token_ids[begin - self.order : end], dtype=np.int64)
        num = end + 1 - begin
        keys = piece[:num]
        for i in range(1, self.order):
            keys = keys << BITS ^ piece[i : i + num]
        keys &= self._mask
        by_key = np.argsort(keys, kind="stable")
        keys, places = keys[by_key], by_key + begin
        is_first = np.empty(num, dtype=bool)
        is_first[0], is_first[1:] = True, keys[1:] != keys[:-1]
        older = np.empty(num, dtype=np.intc)
        older[by_key[1:]] = places[:-1]
        firsts = np.flatnonzero(is_first)
        distinct = keys[firsts].tolist()
        newest = self._newest
        older[by_key[firsts]] = [newest.get(key, NOWHERE) for key in distinct]
        self._older.frombytes(older.tobytes())
        newest.update(zip(distinct, places[np.append(firsts[1:], num) - 1].tolist(), strict=True))


def key_of(token_ids: SequenceOf[int]) -> int:
    """Key of an n-gram, to be cut to the bits of its order: exact where no id has more than `BITS` bits."""
    key = 0
    for token_id in token_ids:
        key = key << BITS ^ token_id
    return key
