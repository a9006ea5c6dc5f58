"""Drafts that a device computes whole: pass after pass, without the host between them."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from ...core.draft import Draft
from ...core.sequence import Sequence
from ...models.heads.passes import HostPasses

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DraftRows:
    """S sequences, with the new tokens of the first pass; each has blocks for its draft."""

    sequences: list[Sequence]
    starts: list[int]  # position of each one's first new token, or entry of a head
    token_ids: list[list[int]]  # of each, its new tokens
    depths: list[int]  # of each, how many tokens are drafted: descending, so that a pass has the first sequences

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def own_first(self) -> list[tuple[int, int]]:
        """Rows of the first pass as (sequence, new token), in order: first the last row of each sequence, after which
        it drafts. KV of all rows is stored before they attend."""
        lasts = [(s, len(ids) - 1) for s, ids in enumerate(self.token_ids)]
        return lasts + [(s, i) for s, ids in enumerate(self.token_ids) for i in range(len(ids) - 1)]


class DraftPasses(Protocol):
    """Passes of a model that drafts, on a device."""

    @property
    def max_rows(self) -> int:
        """Number of rows that a first pass has at most."""
        ...

    def draft(self, rows: DraftRows) -> list[Draft]:
        """Compute the drafts of these sequences, and wait for them."""
        ...

    def close(self) -> None:
        """Free the graphs: no draft is computed any more. Idempotent."""
        ...


class HeadPasses(HostPasses, Protocol):
    """Passes of a head, on a device. What the methods of HostPasses do is to be done by `run`."""

    @property
    def max_rows(self) -> int:
        """Number of rows that a first pass has at most."""
        ...

    def draft(self, rows: DraftRows, taken: SequenceOf[SequenceOf[Tensor]]) -> list[Draft]:
        """Compute what DraftPasses does. taken: of each sequence, in parts, what its target has left of the tokens
        before its new ones, [n, A]."""
        ...

    def run(self, work: Callable[[], T]) -> T:
        """Do other work of the head on the device, and wait for it; return what it gives."""
        ...

    def close(self) -> None:
        """See DraftPasses."""
        ...
