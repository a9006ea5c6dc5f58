"""PredictedProposer: drafts from the text that a client expects (OpenAI's `prediction`; Request.prediction).

An answer follows its prediction from the beginning. Where it leaves it, its last two tokens are looked for ahead in the
prediction, and the nearest place is where it goes on. The place is a function of the answer's tokens alone, so a
sequence that comes from another worker finds it again.
"""

from dataclasses import dataclass

from ..core.draft import NO_DRAFT, Draft
from ..core.sequence import Sequence

AHEAD = 4096  # tokens among which a place is looked for
BEGUN = 4  # tokens that count as followed at the beginning
RETURNED = 2  # ... and where the last two tokens were found again


@dataclass(slots=True)
class _Cursor:
    num_tokens: int  # of the sequence, that were compared
    position: int = 0  # in the prediction, of the token that is expected next
    num_followed: int = BEGUN  # tokens that were as predicted; 0: the answer has left the prediction


class PredictedProposer:
    def __init__(self) -> None:
        self._places: dict[str, _Cursor] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        prediction, ids = sequence.request.prediction, sequence.token_ids
        place = self._places.get(sequence.key)
        if place is None:
            place = self._places[sequence.key] = _Cursor(sequence.num_prompt)
        for i in range(place.num_tokens, len(ids)):
            _follow(place, prediction, ids[i], ids[i - 1] if i > sequence.num_prompt else None)
        place.num_tokens = len(ids)
        if not place.num_followed:
            return NO_DRAFT
        token_ids = list(prediction[place.position : place.position + max_tokens])
        followed = place.num_followed
        return Draft(token_ids, [(followed + i) / (followed + i + 1) for i in range(len(token_ids))])

    def ended(self, sequence: Sequence) -> None:
        self._places.pop(sequence.key, None)


def _follow(place: _Cursor, prediction: tuple[int, ...], token_id: int, previous: int | None) -> None:
    """Compare the next token of an answer; previous: the one before it; None: it is the first."""
    if place.num_followed and place.position < len(prediction) and prediction[place.position] == token_id:
        place.position += 1
        place.num_followed += 1
        return
    place.num_followed = 0
    if previous is None:
        return
    position, end = max(place.position, 1), place.position + AHEAD
    while position:
        try:
            position = prediction.index(token_id, position, end) + 1
        except ValueError:
            return
        if prediction[position - 2] == previous:
            place.position, place.num_followed = position, RETURNED
            return
