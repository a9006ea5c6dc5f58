"""Suffix decoding: what mostly followed the longest suffix of a sequence that occurred before, in it or in earlier
answers (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).

    longest match of p tokens, p in LENGTHS  ->  what followed each occurrence  ->  vote, token by token

A draft follows the most frequent token of those occurrences that agree with it so far: the path that the paper's suffix
trie takes. It ends at `ALPHA` · p tokens, or where the product of its chances is small. Instead of a trie, whose nodes
are dicts, hash chains lead to the `MOST_PLACES` newest occurrences of the last trigram (in the sequence: also of the
last bigram), and p is found among those: less memory, and less time a token. The newest
`MOST_VOTES` of those that match p tokens vote.
"""

from array import array
from collections.abc import Sequence as SequenceOf

from ..core.draft import NO_DRAFT, Draft
from ..core.sequence import Sequence
from .answers import BOUNDARY, MOST_TOKENS, AnswerStore, TenantAnswers
from .ngram import copied
from .occurrences import SequenceIndex

LENGTHS = (2, 3, 4, 8, 16, 32)  # of matches
MOST_PLACES = 16  # that are compared
MOST_VOTES = 8
ALPHA = 2  # tokens drafted for each that matched
LEAST_PRODUCT = 0.05  # of chances, of the last token of a draft
DOUBT = 2.0  # occurrences that went on otherwise, assumed for each token that matched: DOUBT / p

Match = tuple[int, list[int]]  # its length and places, newest first


class SuffixProposer:
    def __init__(self, max_tokens: int = MOST_TOKENS) -> None:
        """max_tokens: of earlier answers, of all tenants."""
        self._indexes: dict[str, SequenceIndex] = {}
        self._answers = AnswerStore(max_tokens)

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        ids = sequence.token_ids
        index = self._indexes.get(sequence.key)
        if index is None:
            index = self._indexes[sequence.key] = SequenceIndex()
        if not index.catch_up(ids):
            return NO_DRAFT
        length, places = _own_match(ids, index)
        answers = self._answers.of(sequence.request.cache_salt)
        if answers is not None and length < LENGTHS[-1]:
            other_length, others = _match_of_answers(ids, answers)
            if other_length > length:
                return _voted(_followed(answers.text, others, max_tokens), other_length, max_tokens)
        return _voted([copied(ids, place, max_tokens) for place in places], length, max_tokens)

    def ended(self, sequence: Sequence) -> None:
        """Keep the answer for others of its tenant, behind the end of its prompt: by that its first token is found."""
        if self._indexes.pop(sequence.key, None) is not None:
            begin = max(sequence.num_prompt - LENGTHS[-1], 0)
            self._answers.add(sequence.request.cache_salt, sequence.token_ids[begin:], sequence.num_prompt - begin)


def _own_match(ids: list[int], index: SequenceIndex) -> Match:
    tail = ids[-LENGTHS[-1] :]
    if len(ids) > 3:
        found = _longest(ids, index.trigrams.find(tail[-3:], MOST_PLACES), tail)
        if found[0]:
            return found
    if len(ids) > 2:
        return _longest(ids, index.bigrams.find(tail[-2:], MOST_PLACES), tail)
    return 0, []


def _match_of_answers(ids: list[int], answers: TenantAnswers) -> Match:
    tail = ids[-LENGTHS[-1] :]
    places = answers.trigrams.find(tail[-3:], MOST_PLACES) if len(ids) > 2 else []
    return _longest(answers.text, places, array("i", tail)) if places else (0, [])


def _longest(text: SequenceOf[int], places: list[int], tail: SequenceOf[int]) -> Match:
    """Length of the longest match of `tail` before any of the places, and the newest that match as far."""
    best: Match = 0, []
    for length in LENGTHS:
        if length > len(tail):
            break
        last = tail[-length:]
        places = [place for place in places if place >= length and text[place - length : place] == last]
        if not places:
            break
        best = length, places
    return best[0], best[1][:MOST_VOTES]


def _followed(text: "array[int]", places: list[int], max_tokens: int) -> list[list[int]]:
    """Tokens that followed each place in its answer."""
    found: list[list[int]] = []
    for place in places:
        token_ids = text[place : place + max_tokens].tolist()
        found.append(token_ids[: token_ids.index(BOUNDARY)] if BOUNDARY in token_ids else token_ids)
    return found


def _voted(followed: list[list[int]], length: int, max_tokens: int) -> Draft:
    """Follow the most frequent token; of equally frequent ones, the newest occurrence's."""
    token_ids: list[int] = []
    chances: list[float] = []
    product = 1.0
    for i in range(min(max_tokens, ALPHA * length)):
        found = [each[i] for each in followed if len(each) > i]
        if not found:
            break
        token_id, votes = _most_frequent(found) if len(found) > 1 else (found[0], 1)
        chance = votes / (len(found) + DOUBT / (length + i))
        product *= chance
        if product < LEAST_PRODUCT:
            break
        token_ids.append(token_id)
        chances.append(chance)
        if votes < len(followed):
            followed = [each for each in followed if len(each) > i and each[i] == token_id]
    return Draft(token_ids, chances) if token_ids else NO_DRAFT


def _most_frequent(token_ids: list[int]) -> tuple[int, int]:
    """The token and how often it is there; of equally frequent ones, the first."""
    first = token_ids[0]
    votes = token_ids.count(first)
    if 2 * votes < len(token_ids):
        first = max(token_ids, key=token_ids.count)
        votes = token_ids.count(first)
    return first, votes
