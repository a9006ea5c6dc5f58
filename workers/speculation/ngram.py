"""Prompt lookup: what followed the last tokens of a sequence where they occurred before (Saxena 2023).

The last n tokens are looked up, n from 5 down to 2, and the tokens after their newest earlier occurrence are drafted.
Of trigrams the newest `MOST_PLACES` occurrences are examined for n = 5, 4 and 3. A copy that reaches the end of the
text goes on in the draft itself, so that a loop is drafted whole, as LZ77 copies overlapping runs. Memory: about 0.3 kB
a token of a sequence (see occurrences.py).
"""

from collections.abc import Sequence as SequenceOf

from ..core.draft import NO_DRAFT, Draft
from ..core.sequence import Sequence
from .occurrences import Occurrences, SequenceIndex

LONGEST, SHORTEST = 5, 2
MOST_PLACES = 16
# Of a token that follows a match of so many, accepted drafts counted: priors, which acceptance.py calibrates.
CHANCES = [0.0, 0.0, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8]
LAST_CHANCE = 0.85


class NgramProposer:
    def __init__(self) -> None:
        self._indexes: dict[str, SequenceIndex] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        ids = sequence.token_ids
        index = self._indexes.get(sequence.key)
        if index is None:
            index = self._indexes[sequence.key] = SequenceIndex()
        if not index.catch_up(ids) or len(ids) <= SHORTEST:
            return NO_DRAFT
        place, length = _longest(ids, index.trigrams) if len(ids) > 3 else (0, 0)
        if not length:
            place, length = _newest_bigram(ids, index.bigrams)
        if not length:
            return NO_DRAFT
        token_ids = copied(ids, place, max_tokens)
        return Draft(token_ids, _chances(length, len(token_ids)))

    def ended(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.key, None)


def copied(ids: SequenceOf[int], place: int, num_tokens: int) -> list[int]:
    """`num_tokens` tokens of the text from `place` on; past its end they repeat what was copied."""
    token_ids = list(ids[place : place + num_tokens])
    while len(token_ids) < num_tokens:
        token_ids += token_ids[: num_tokens - len(token_ids)]
    return token_ids


def _longest(ids: list[int], trigrams: Occurrences) -> tuple[int, int]:
    """Place and length of the longest match of 3 to `LONGEST` tokens, the newest of equal ones; length 0: none."""
    tail = ids[-3:]
    fourth = ids[-4]
    fifth = ids[-5] if len(ids) > 4 else None
    best, best_length = 0, 0
    for place in trigrams.find(tail, MOST_PLACES):
        if place > 3 and ids[place - 4] == fourth:
            if place > 4 and ids[place - 5] == fifth and ids[place - 3 : place] == tail:
                return place, LONGEST
            length = 4
        else:
            length = 3
        if length > best_length and ids[place - 3 : place] == tail:
            best, best_length = place, length
    return best, best_length


def _newest_bigram(ids: list[int], bigrams: Occurrences) -> tuple[int, int]:
    tail = ids[-2:]
    for place in bigrams.find(tail, 1):
        if ids[place - 2 : place] == tail:
            return place, 2
    return 0, 0


def _chances(length: int, num_tokens: int) -> list[float]:
    chances = CHANCES[length : length + num_tokens]
    return chances + [LAST_CHANCE] * (num_tokens - len(chances))
