"""The routers' streams to one worker: which requests came over each, and what is sent back. One event loop.

A sequence's key names the link that it came over and the router's handle for it there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ...proto import worker_pb2
from ..common.channel import SendQueue, join_worker_messages
from ..common.errors import DiptychError, StepFailed
from ..core.embedding import Embedding
from ..engine.events import PromptLogprobsEvents
from ..handoff.types import HandoffSealed

SNAPSHOT_NAMES = 1 << 16  # in one message: 1.2 MB


@dataclass(slots=True, eq=False)
class RouterLink:
    """Stream of a router. `keys` are the requests that live as long as it does."""

    number: int
    outbox: SendQueue[worker_pb2.WorkerMessage] = field(default_factory=lambda: SendQueue(join_worker_messages))
    keys: dict[str, None] = field(default_factory=dict[str, None])  # in order: a run can be replayed
    compiling: set[str] = field(default_factory=set[str])  # requests whose grammars are, aborted ones too
    knows_draining: bool = False  # its other end submits nothing any more
    is_done: bool = False  # nor does it wait for anything

    def key(self, handle: int) -> str:
        return f"{self.number}/{handle}"

    def send(self, message: worker_pb2.WorkerMessage) -> None:
        self.outbox.put(message)

    def send_snapshot(self, names: list[bytes]) -> None:
        """Send the names of all cached blocks. As one message those of millions would exceed gRPC's limit."""
        for first in range(0, len(names) or 1, SNAPSHOT_NAMES):
            some = worker_pb2.BlockEvents(stored=names[first : first + SNAPSHOT_NAMES], cleared=first == 0)
            self.send(worker_pb2.WorkerMessage(blocks=some))


class RouterLinks:
    """The open streams. A message to a closed one is dropped: its router resumes elsewhere."""

    def __init__(self) -> None:
        self._links: dict[int, RouterLink] = {}
        self._num_opened = 0

    def __iter__(self) -> Iterator[RouterLink]:
        return iter(self._links.values())

    def open(self) -> RouterLink:
        self._num_opened += 1
        link = self._links[self._num_opened] = RouterLink(self._num_opened)
        return link

    def close(self, link: RouterLink) -> None:
        del self._links[link.number]

    def at(self, number: int) -> RouterLink | None:
        return self._links.get(number)

    def of(self, key: str) -> RouterLink | None:
        return self._links.get(parts_of(key)[0])

    def has(self, key: str) -> bool:
        """Return whether the request still lives here."""
        link = self.of(key)
        return link is not None and key in link.keys

    def forget(self, key: str) -> None:
        """Forget a request: the end of the stream need not abort it any more."""
        link = self.of(key)
        if link is not None:
            link.keys.pop(key, None)

    def send(self, key: str, message: worker_pb2.WorkerMessage) -> None:
        link = self.of(key)
        if link is not None:
            link.send(message)

    def send_prompt_logprobs(self, events: PromptLogprobsEvents) -> None:
        for key, found in events:
            for piece in found.pieces():
                self.send(key, worker_pb2.WorkerMessage(prompt_logprobs=piece.to_proto(handle_of(key))))

    def send_embedding(self, key: str, found: Embedding) -> None:
        """Send the embedding that ends a request."""
        self.forget(key)
        self.send(key, worker_pb2.WorkerMessage(embedding=found.to_proto(handle_of(key))))

    def send_failure(self, key: str, error: DiptychError, *, handoff: bool = False) -> None:
        failed = worker_pb2.RequestFailed(
            handle=handle_of(key),
            error=type(error).__name__,
            message=error.message,
            retryable=error.retryable,
            handoff=handoff,
            num_output_tokens=error.num_output if isinstance(error, StepFailed) else 0,
        )
        self.send(key, worker_pb2.WorkerMessage(failed=failed))

    def handed_off(self, sealed: HandoffSealed) -> None:
        """A running sequence stopped here, after all its tokens were sent, or a prefix is computed: tell its router."""
        if sealed.key is not None:
            handed_off = worker_pb2.HandedOff(
                handle=handle_of(sealed.key),
                num_output_tokens=len(sealed.output_token_ids),
                handoff_id=sealed.handoff_id,
                num_cached=sealed.num_cached,
                num_stored=sealed.num_stored,
            )
            self.send(sealed.key, worker_pb2.WorkerMessage(handed_off=handed_off))

    def broadcast(self, message: worker_pb2.WorkerMessage) -> None:
        for link in self:
            link.send(message)


def handle_of(key: str) -> int:
    return parts_of(key)[1]


@lru_cache(4096)  # asked once a token
def parts_of(key: str) -> tuple[int, int]:
    """Number of the key's link, and the router's handle."""
    number, _, handle = key.partition("/")
    return int(number), int(handle)
