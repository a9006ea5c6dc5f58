"""Work on rows that is cut where workers exchange them, so that other work may be launched in between.

work        a generator: yields each exchange, a call, and is sent what that gave
finished    calls each one at once, as if the work were not cut
"""

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")

Exchange = Callable[[], Tensor]  # with the other workers, which call theirs in the same order
InTurns: TypeAlias = Generator[Exchange, Tensor, T]


def finished(work: InTurns[T]) -> T:
    """Do all of the work, and return what it gives."""
    try:
        given = next(work)()
        while True:
            given = work.send(given)()
    except StopIteration as end:
        return end.value
