"""Interface of the writers of answers, one for each API."""

from collections.abc import Sequence
from typing import Any, Protocol

from .text_completion import TextDelta


class AnswerForm(Protocol):
    tells_of_prompts: bool  # log-probabilities of prompts will come: `prepare` each batch

    @property
    def is_small(self) -> bool:
        """Return whether the whole answer is written at once."""
        ...

    async def prepare(self, batch: Sequence[TextDelta]) -> Sequence[TextDelta]:
        """Deltas of this and earlier batches that can be written now."""
        ...

    def events(self, batch: Sequence[TextDelta]) -> str:
        """Server-sent events of new deltas."""
        ...

    def last_events(self) -> str:
        """Last events of a stream."""
        ...

    async def whole(self, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        """Whole answer as JSON."""
        ...
