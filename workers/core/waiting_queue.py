"""Queue of waiting sequences: decides which is admitted next. Pure; knows no block. `advance` gives it the time.

    add ─> waiting ──pop──> (admitted)          preempted ones come before all that wait, oldest first
            │  ^ └─discard
            v  │
           parked on a name, until `unpark` or a time: somebody computes, or brings, just what this sequence needs

Between tenants (the names of API keys, or where requests have none their cache salts): whoever has been served the
least, in tokens, comes next; a tenant that was away has no credit from then (virtual token counter, Sheng et al. 2024,
"Fairness in Serving Large Language Models", §4).
Within a tenant: whose first token is due first. One that is late waits for those that can still be in time: where not
all can be, first come first served would let all be late. After LATE_S the late ones get LATE_SHARE of the tokens that
are admitted, and after half of the time to its deadline one goes before all, so that nobody starves. So does one that
made tokens elsewhere, and is resumed: its client waits in the middle of an answer.
Every operation is O(log waiting), amortised.
"""

import heapq
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from .sequence import Sequence

LATE_S = 10.0  # that a late sequence waits until it has a share
LATE_SHARE = 1 / 8  # more would make others late for those that are late anyway
MOST_GONE = 64  # sequences that left before they were due, kept beside twice as many as wait
OUTPUT_WEIGHT = 2  # cost of a generated token, in prefilled tokens (the same paper's choice)

_Entry = tuple[float, int, Sequence]


@dataclass(slots=True, eq=False)
class _Tenant:
    number: int
    served: float  # tokens
    late_share: float = 0.0  # tokens that late sequences may be admitted with before others
    num_present: int = 0  # its sequences here, waiting or running
    # Heaps; entries of requests that have left are skipped.
    queue: list[_Entry] = field(default_factory=list[_Entry])  # by when they are due
    late: list[_Entry] = field(default_factory=list[_Entry])  # by when they go before the queue


class WaitingQueue:
    def __init__(self) -> None:
        self.now = 0.0  # by the clock of Sequence.due
        self.num_tokens = 0  # to compute, of all that wait
        self._waiting: dict[Sequence, None] = {}
        self._preempted: dict[Sequence, None] = {}
        self._preempted_heap: list[_Entry] = []
        self._parked: dict[Hashable, dict[Sequence, None]] = {}
        # A heap; only those still parked count. The number tells those apart that a sequence was parked until twice.
        self._parked_until: list[tuple[float, int, Sequence, Hashable]] = []
        self._num_parked = 0
        self._tenants: dict[bytes, _Tenant] = {}
        self._next_tenants: list[tuple[float, int, _Tenant]] = []  # a heap; only entries with today's `served` count
        self._num_tenants = 0
        self._floor = 0.0  # service that the tenant that came last had received
        self.num_late_tokens = 0  # of num_tokens, those of late sequences
        self._late: set[Sequence] = set()
        self._due: list[_Entry] = []  # a heap of those that are not late yet; entries of others are skipped

    def __len__(self) -> int:
        return len(self._waiting) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._waiting

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting or sequence in self._preempted

    def is_preempted(self, sequence: Sequence) -> bool:
        return sequence in self._preempted

    def enter(self, sequence: Sequence) -> None:
        """Register a sequence that is on this worker, until `leave`."""
        name = _tenant_of(sequence)
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_tenants += 1
            tenant = self._tenants[name] = _Tenant(self._num_tenants, self._floor)
        tenant.num_present += 1

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence; its output counts as served."""
        name = _tenant_of(sequence)
        tenant = self._tenants[name]
        tenant.num_present -= 1
        if not tenant.num_present:
            del self._tenants[name]
        else:
            self._serve(tenant, OUTPUT_WEIGHT * (sequence.num_output - sequence.num_resumed))

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None
        self.num_tokens += sequence.num_tokens
        heapq.heappush(self._due, (sequence.due, sequence.arrival, sequence))
        if len(self._due) > 2 * len(self._waiting) + MOST_GONE:
            self._due = [entry for entry in self._due if entry[2] in self._waiting]
            heapq.heapify(self._due)
        self._line_up(sequence)

    def add_preempted(self, sequence: Sequence) -> None:
        self._preempted[sequence] = None
        self.num_tokens += sequence.num_tokens
        heapq.heappush(self._preempted_heap, (0.0, sequence.arrival, sequence))

    def discard(self, sequence: Sequence) -> bool:
        """Remove a waiting sequence; returns whether it was there."""
        if sequence not in self:
            return False
        self._waiting.pop(sequence, None)
        self._preempted.pop(sequence, None)
        self.num_tokens -= sequence.num_tokens
        if sequence in self._late:
            self._late.remove(sequence)
            self.num_late_tokens -= sequence.num_tokens
        return True

    def gives_way_until(self, sequence: Sequence) -> float:
        """Return the time until which the sequence that `peek` gives lets those go first that can be in time; 0: it
        does not, for it is not late, or goes before them, or was preempted."""
        if sequence not in self._waiting or sequence.due >= self.now or self._has_turn(sequence):
            return 0.0
        return min(self.now + LATE_S, sequence.due + _patience_s(sequence))

    def peek(self) -> Sequence | None:
        """The next sequence to admit; None: there is none that is not parked."""
        heap = self._preempted_heap
        while heap:
            if heap[0][2] in self._preempted:
                return heap[0][2]
            heapq.heappop(heap)
        tenant = self._next_tenant()
        return None if tenant is None else self._heap(tenant)[0][2]

    def pop(self, num_new: int) -> None:
        """Admit the sequence that `peek` gives, with so many tokens to compute."""
        sequence = self.peek()
        assert sequence is not None
        if sequence in self._preempted:
            heapq.heappop(self._preempted_heap)
        else:
            tenant = self._take_first()
            if sequence.due < self.now:
                tenant.late_share -= num_new if tenant.late_share > 0 else 0
            elif tenant.late and self.now > tenant.late[0][2].due + LATE_S:
                tenant.late_share += num_new * LATE_SHARE / (1 - LATE_SHARE)
            self._floor = max(self._floor, tenant.served)
            self._serve(tenant, num_new)
        self.discard(sequence)

    def park(self, name: Hashable, until: float = math.inf) -> None:
        """Park the sequence that `peek` gives until `unpark(name)`, or that time. It must not be a preempted one."""
        sequence = self.peek()
        assert sequence is not None and sequence in self._waiting
        self._line_up_tenant(self._take_first())
        self._parked.setdefault(name, {})[sequence] = None
        if until < math.inf:
            self._num_parked += 1
            heapq.heappush(self._parked_until, (until, self._num_parked, sequence, name))

    def unpark(self, name: Hashable) -> list[Sequence]:
        """Put those that were parked on `name` back into the queue; returns them."""
        parked = [s for s in self._parked.pop(name, ()) if s in self._waiting]
        for sequence in parked:
            self._line_up(sequence)
        return parked

    def advance(self, now: float) -> None:
        """Set the time; put those back into the queue that were parked until then."""
        self.now = now
        while self._due and (self._due[0][0] < now or self._due[0][2] not in self._waiting):
            _, _, sequence = heapq.heappop(self._due)
            if sequence in self._waiting:
                self._late.add(sequence)
                self.num_late_tokens += sequence.num_tokens
        while self.next_unpark() <= now:
            _, _, sequence, name = heapq.heappop(self._parked_until)
            del self._parked[name][sequence]
            self._line_up(sequence)

    def next_unpark(self) -> float:
        """Time at which the next parked sequence is put back if nobody unparks it; infinite: none has such a time."""
        heap = self._parked_until
        while heap and not (heap[0][2] in self._waiting and heap[0][2] in self._parked.get(heap[0][3], ())):
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def _next_tenant(self) -> _Tenant | None:
        """The tenant served least of those that have a sequence in the queue, which is then the first of its queue."""
        while self._next_tenants:
            served, _, tenant = self._next_tenants[0]
            if served == tenant.served and self._heap(tenant):
                return tenant
            heapq.heappop(self._next_tenants)
        return None

    def _take_first(self) -> _Tenant:
        """Remove the next sequence from its queue, and the tenant's entry with it."""
        _, _, tenant = heapq.heappop(self._next_tenants)
        heapq.heappop(self._heap(tenant))
        return tenant

    def _heap(self, tenant: _Tenant) -> list[_Entry]:
        """The one of its heaps whose first sequence is next; an empty one where it has none."""
        queue, late = tenant.queue, tenant.late
        while queue and (queue[0][0] < self.now or queue[0][2] not in self._waiting):
            entry = heapq.heappop(queue)
            if entry[2] in self._waiting:
                heapq.heappush(late, (entry[0] + min(LATE_S, _patience_s(entry[2])), *entry[1:]))
        while late and late[0][2] not in self._waiting:
            heapq.heappop(late)
        return late if late and (not queue or self._has_turn(late[0][2])) else queue

    def _has_turn(self, sequence: Sequence) -> bool:
        """Return whether a late sequence goes before those that can be in time."""
        late_s = self.now - sequence.due
        has_share = late_s > LATE_S and self._tenants[_tenant_of(sequence)].late_share > 0
        return has_share or late_s > _patience_s(sequence)

    def _serve(self, tenant: _Tenant, num_tokens: int) -> None:
        tenant.served += num_tokens
        self._line_up_tenant(tenant)

    def _line_up(self, sequence: Sequence) -> None:
        tenant = self._tenants[_tenant_of(sequence)]
        if not tenant.queue and not tenant.late:
            tenant.served = max(tenant.served, self._floor)
            self._line_up_tenant(tenant, is_new=True)
        heapq.heappush(tenant.queue, (sequence.due, sequence.arrival, sequence))

    def _line_up_tenant(self, tenant: _Tenant, *, is_new: bool = False) -> None:
        if tenant.queue or tenant.late or is_new:
            heapq.heappush(self._next_tenants, (tenant.served, tenant.number, tenant))


def _patience_s(sequence: Sequence) -> float:
    """Return how long it waits at most, once it is late, for those that can be in time; one whose client waits in the
    middle of its answer does not."""
    return 0.0 if sequence.num_output else max(0.0, sequence.deadline - sequence.due) / 2


def _tenant_of(sequence: Sequence) -> bytes:
    return sequence.request.tenant or sequence.request.cache_salt
