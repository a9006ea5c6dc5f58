"""Embeddings of one call: a few of its inputs at a time, each a request of the router. Knows neither HTTP nor gRPC.

Life of an EmbeddingRun: made by FrontDoor.embed -> vectors() -> the last input's has come | an error of any ends all |
the deadline. However it ends, every stream is closed before vectors() returns.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ...workers.common.errors import DeadlineExceeded, InternalError, InvalidRequest
from ...workers.common.request import Request, SamplingParams
from ...workers.core.embedding import EmbeddingSpec, Vector
from ..routing.token_source import TokenSource
from .access.usage import Usage

NOTHING_SAMPLED = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """Form in which a call wants its embeddings."""

    dimensions: int | None = None  # None: all
    as_base64: bool = False  # of the numbers' bytes


def check_inputs(num_inputs: int, size: int, max_inputs: int, max_floats: int) -> None:
    """Raise InvalidRequest for none or too many inputs whose embeddings have `size` numbers."""
    if not num_inputs:
        raise InvalidRequest("the input is empty: send at least one", param="prompt")
    if num_inputs > max_inputs:
        raise InvalidRequest(f"{num_inputs} inputs; a call has at most {max_inputs}: send several", param="prompt")
    if num_inputs * size > max_floats:
        raise InvalidRequest(
            f"the embeddings of {num_inputs} inputs have {num_inputs * size} numbers; a call may have at most "
            f"{max_floats}: send several calls",
            param="prompt",
        )


class EmbeddingRun:
    def __init__(
        self,
        source: TokenSource,
        spec: EmbeddingSpec,
        requests: Sequence[Request],
        dimensions: int | None,
        *,
        asked_s: float,
        most_at_once: int,
    ) -> None:
        """`asked_s`: the client's whole time-out."""
        self.requests = requests
        self._source = source
        self._spec = spec
        self._dimensions = dimensions
        self._asked_s = asked_s
        self._most_at_once = most_at_once
        self._num_cached = self._num_stored = 0

    @property
    def timeout_s(self) -> float:
        return self.requests[0].timeout_s

    @property
    def service_tier(self) -> str:
        return self.requests[0].level.tier

    @property
    def num_floats(self) -> int:
        """Numbers of all embeddings."""
        return len(self.requests) * (self._dimensions or self._spec.size)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Finish reasons: an embedding has none."""
        return ()

    @property
    def usage(self) -> Usage:
        """Tokens of the inputs, and those that came from a prefix cache, or were added to it, so far."""
        num_tokens = sum(len(request.prompt_token_ids) for request in self.requests)
        return Usage(num_tokens, 0, self._num_cached, stored_tokens=self._num_stored)

    async def vectors(self) -> list[Vector]:
        """Embeddings, in the order of the inputs. Cancelling it aborts what runs. Raises DiptychErrors."""
        found: dict[int, Vector] = {}
        rest = iter(enumerate(self.requests))
        try:
            async with asyncio.timeout(self.timeout_s), asyncio.TaskGroup() as group:
                for _ in range(min(self._most_at_once, len(self.requests))):
                    group.create_task(self._work(rest, found))
        except TimeoutError as e:
            raise DeadlineExceeded(
                f"the embeddings were not computed within {self._asked_s:g} s: send fewer inputs, or ask for a longer "
                "timeout_s"
            ) from e
        except BaseExceptionGroup as e:
            raise e.exceptions[0] from None
        if len(found) != len(self.requests):
            raise InternalError("some embeddings did not come: please report this")
        return [found[i] for i in range(len(found))]

    async def _work(self, rest: Iterator[tuple[int, Request]], found: dict[int, Vector]) -> None:
        """Compute what is left, one input after the other."""
        for i, request in rest:
            found[i] = self._spec.cut(await self._embedding(request), self._dimensions)

    async def _embedding(self, request: Request) -> Vector:
        async with aclosing(self._source.stream(request)) as deltas:
            async for delta in deltas:
                vector = delta.embedding
                if vector is None or len(vector) != self._spec.size:
                    raise InternalError("a worker sent something else than the embedding: please report this")
                self._num_cached += delta.num_cached_tokens
                self._num_stored += delta.num_stored_tokens
                return vector
        raise InternalError("the stream ended without an embedding: please report this")
