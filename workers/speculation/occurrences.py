"""Occurrences: the places in a growing text where each of its n-grams ended, newest first. SequenceIndex: a sequence's.

Hash chains, as LZ77 coders have them (zlib's deflate): a dict leads from an n-gram's key to its newest place, an array
says how far before each place the one before it with the same key is. One dict insert and one array entry a token; long
pieces of text are sorted by numpy instead, several times as fast. Memory: about 150 bytes for each n-gram that differs
from all others, 4 for each repetition. Two n-grams may share a key, so whoever asks compares the tokens.
"""

from array import array
from collections.abc import Sequence as SequenceOf

import numpy as np

LONG = 48  # tokens: more are sorted
BITS = 21  # of a token id in a key: three of them have no sign
LARGEST_ORDER = 3
MOST_INDEXED = 4096  # tokens of one sequence in a step: a long prompt is indexed over several


class Occurrences:
    """Places of n-grams of `order` tokens in one text. A place is the number of tokens up to an n-gram's end, which is
    the position of the token that followed it."""

    __slots__ = ("_cut", "_mask", "_newest", "_older", "order")

    def __init__(self, order: int) -> None:
        assert order <= LARGEST_ORDER
        self.order = order
        self._mask = (1 << BITS * order) - 1
        self._newest: dict[int, int] = {}  # places, with what was cut
        self._older = array("i", [0]) * order  # by place: how far before it; 0: nowhere
        self._cut = 0  # tokens

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
        newest, older, mask, cut = self._newest, self._older, self._mask, self._cut
        key = key_of(token_ids[begin - self.order : begin - 1])
        for place in range(begin, end + 1):
            key = (key << BITS ^ token_ids[place - 1]) & mask
            whole = place + cut
            older.append(whole - newest.get(key, whole))
            newest[key] = whole

    def find(self, last_ids: SequenceOf[int], most: int) -> list[int]:
        """Return at most `most` places of the n-gram `last_ids`, newest first, and perhaps of others."""
        whole = self._newest.get(key_of(last_ids) & self._mask)
        if whole is None:
            return []
        place, older, places = whole - self._cut, self._older, list[int]()
        while place >= self.order:
            places.append(place)
            if len(places) == most or not older[place]:
                break
            place -= older[place]
        return places

    def cut(self, token_ids: SequenceOf[int], num_tokens: int) -> None:
        """Forget the first tokens of the text: places count from behind them from now on. `token_ids`: before that."""
        newest, order = self._newest, self.order
        key = key_of(token_ids[: order - 1])
        for place in range(order, min(num_tokens + order, len(self._older))):
            key = (key << BITS ^ token_ids[place - 1]) & self._mask
            if newest.get(key) == place + self._cut:
                del newest[key]
        del self._older[:num_tokens]
        self._older.extend([0] * (order - len(self._older)))
        self._cut += num_tokens

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
        older = np.zeros(num, dtype=np.intc)
        older[by_key[1:]] = np.diff(places)
        firsts = np.flatnonzero(is_first)
        distinct, first_places = keys[firsts].tolist(), (places[firsts] + self._cut).tolist()
        newest = self._newest
        older[by_key[firsts]] = [w - newest.get(key, w) for key, w in zip(distinct, first_places, strict=True)]
        self._older.frombytes(older.tobytes())
        lasts = places[np.append(firsts[1:], num) - 1] + self._cut
        newest.update(zip(distinct, lasts.tolist(), strict=True))


class SequenceIndex:
    """N-grams of a sequence's tokens, except those that end it: no token follows them yet."""

    __slots__ = ("bigrams", "trigrams")

    def __init__(self) -> None:
        self.trigrams, self.bigrams = Occurrences(3), Occurrences(2)

    def catch_up(self, token_ids: SequenceOf[int]) -> bool:
        """Add what is not known yet, at most `MOST_INDEXED` tokens. Returns whether all is known now."""
        last = len(token_ids) - 1
        end = min(last, self.bigrams.num_places + MOST_INDEXED)
        self.trigrams.extend(token_ids, end)
        self.bigrams.extend(token_ids, end)
        return end == last


def key_of(token_ids: SequenceOf[int]) -> int:
    """Key of an n-gram, to be cut to the bits of its order: exact where no id has more than `BITS` bits."""
    key = 0
    for token_id in token_ids:
        key = key << BITS ^ token_id
    return key
