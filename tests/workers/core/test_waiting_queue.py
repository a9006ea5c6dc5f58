import gc
import math

from diptych.workers.core.sequence import Sequence
from diptych.workers.core.waiting_queue import LATE_S, LATE_SHARE, MOST_GONE, WaitingQueue

from ...support.sequences import make_sequence


def waiting(
    queue: WaitingQueue, num_tokens: int = 4, salt: bytes = b"", due: float = 0.0, tenant: bytes = b""
) -> Sequence:
    sequence = make_sequence([1] * num_tokens, salt=salt, tenant=tenant)
    sequence.due = due
    queue.enter(sequence)
    queue.add(sequence)
    return sequence


def test_fresh_salts_give_a_tenant_no_further_turns() -> None:
    queue = WaitingQueue()
    many = [waiting(queue, salt=bytes([i]), tenant=b"many") for i in range(8)]
    one = [waiting(queue, tenant=b"one") for _ in range(2)]
    assert admitted(queue) == [many[0], one[0], many[1], one[1], *many[2:]]


def admitted(queue: WaitingQueue) -> list[Sequence]:
    order: list[Sequence] = []
    while (sequence := queue.peek()) is not None:
        queue.pop(sequence.num_tokens)
        order.append(sequence)
    return order


def test_whose_first_token_is_due_first_and_then_who_came_first() -> None:
    queue = WaitingQueue()
    a, b, c = waiting(queue, due=2.0), waiting(queue, due=1.0), waiting(queue, due=2.0)
    assert admitted(queue) == [b, a, c]
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_a_late_one_waits_for_those_that_can_be_in_time_but_not_for_ever() -> None:
    queue = WaitingQueue()
    late, later = waiting(queue, due=1.0), waiting(queue, due=2.0)
    in_time = [waiting(queue, due=4.0) for _ in range(4)]
    queue.advance(3.0)
    order: list[Sequence] = []
    for _ in range(2):
        order.append(queue.peek() or late)
        queue.pop(1)
    assert order == in_time[:2]
    queue.advance(1.0 + LATE_S + 0.5)
    assert admitted(queue) == [late, later, *in_time[2:]]
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_a_late_one_waits_for_no_more_than_half_the_time_to_its_deadline() -> None:
    queue = WaitingQueue()
    patient, hurried, in_time = waiting(queue, due=1.0), waiting(queue, due=2.0), waiting(queue, due=5.0)
    hurried.deadline = 6.0
    queue.advance(3.9)
    assert queue.peek() is in_time
    queue.advance(4.1)
    assert admitted(queue) == [hurried, in_time, patient]


def test_late_ones_get_a_share_of_what_is_admitted_while_others_can_be_in_time() -> None:
    queue = WaitingQueue()
    late = [waiting(queue, 40, due=float(i)) for i in range(3)]
    in_time = [waiting(queue, 10, due=1000.0) for _ in range(70)]
    queue.advance(3.0 + LATE_S)
    order = admitted(queue)
    assert [order.index(s) for s in late] == [1, 30, 59]  # each after 7 times as many tokens as the one before had
    assert LATE_SHARE == 40 / (29 * 10 - 10 + 40)
    assert [s for s in order if s in in_time] == in_time


def test_one_that_is_resumed_does_not_wait_once_it_is_late() -> None:
    queue = WaitingQueue()
    fresh, resumed, in_time = waiting(queue, due=1.0), waiting(queue, due=2.0), waiting(queue, due=5.0)
    resumed.num_prompt -= 1
    queue.advance(2.5)
    assert queue.gives_way_until(resumed) == 0.0
    assert admitted(queue) == [resumed, in_time, fresh]


def test_late_tokens_are_counted_until_they_are_admitted_or_leave() -> None:
    queue = WaitingQueue()
    first, second = waiting(queue, 5, due=1.0, salt=b"a"), waiting(queue, 7, due=2.0, salt=b"b")
    waiting(queue, 11, due=9.0)
    counts: list[int] = []
    for now in (1.0, 1.5, 2.5):
        queue.advance(now)
        counts.append(queue.num_late_tokens)
    assert counts == [0, 5, 12]
    queue.discard(second)
    assert (queue.num_late_tokens, queue.num_tokens) == (5, 16)
    assert queue.peek() is first
    queue.pop(5)
    assert (queue.num_late_tokens, queue.num_tokens) == (0, 11)


def test_sequences_that_were_admitted_long_before_they_are_due_are_not_kept() -> None:
    def num_alive() -> int:
        gc.collect()
        return sum(type(found) is Sequence for found in gc.get_objects())

    queue, num_before = WaitingQueue(), num_alive()
    for _ in range(1000):
        sequence = waiting(queue, due=1e6)
        queue.pop(4)
        queue.leave(sequence)
    assert num_alive() - num_before <= MOST_GONE + 3


def test_a_late_one_gives_way_for_a_time_unless_it_has_its_turn() -> None:
    queue = WaitingQueue()
    in_time, late, hurried = waiting(queue, due=9.0), waiting(queue, due=1.0), waiting(queue, due=2.0)
    hurried.deadline = 8.0
    queue.advance(4.0)
    assert queue.gives_way_until(in_time) == 0.0
    assert queue.gives_way_until(late) == 4.0 + LATE_S
    assert queue.gives_way_until(hurried) == 5.0
    queue.advance(5.5)
    assert queue.gives_way_until(hurried) == 0.0


def test_a_late_one_that_has_left_is_skipped_and_the_next_tenant_is_served() -> None:
    queue = WaitingQueue()
    gone, other = waiting(queue, due=1.0), waiting(queue, salt=b"other", due=1.5)
    queue.advance(2.0)
    assert queue.peek() == gone
    queue.discard(gone)
    queue.leave(gone)
    assert admitted(queue) == [other]


def test_preempted_ones_come_first_the_oldest_of_them_before() -> None:
    queue = WaitingQueue()
    old, young, new = make_sequence([1]), make_sequence([1]), waiting(queue, due=-1.0)
    for sequence in (young, old):
        queue.enter(sequence)
        queue.add_preempted(sequence)
    assert admitted(queue) == [old, young, new]


def test_tenants_share_by_tokens_however_many_requests_each_has() -> None:
    queue = WaitingQueue()
    flood = [waiting(queue, 10, b"flood") for _ in range(20)]
    others = [waiting(queue, 20, b"other") for _ in range(3)]
    order = admitted(queue)
    assert [s in others for s in order[:9]] == [False, True, False, False, True, False, False, True, False]
    assert [s for s in order if s in flood] == flood


def test_a_tenant_that_was_away_has_no_credit() -> None:
    queue = WaitingQueue()
    here = [waiting(queue, 10, b"here") for _ in range(10)]
    for _ in range(5):
        queue.pop(10)
    back = [waiting(queue, 10, b"back") for _ in range(3)]
    order = admitted(queue)
    assert max(order.index(s) for s in back) >= 4
    assert min(order.index(s) for s in back) <= 1
    assert here[5] in order


def test_output_counts_when_a_sequence_leaves() -> None:
    queue = WaitingQueue()
    talker, _ = waiting(queue, 4, b"a"), waiting(queue, 4, b"a")
    queue.pop(4)
    b = waiting(queue, 4, b"b")
    waiting(queue, 4, b"b")
    talker.token_ids += [7] * 50
    queue.leave(talker)
    assert [s.request.cache_salt for s in admitted(queue)] == [b"b", b"b", b"a"]
    assert b not in queue


def test_who_is_parked_until_a_time_goes_on_then_and_once() -> None:
    queue = WaitingQueue()
    hurried, patient, gone, unparked = (waiting(queue, due=i) for i in range(4))
    queue.park("name", until=5.0)
    queue.park("name")
    queue.park("name", until=1.0)
    queue.discard(gone)
    queue.park("other", until=2.0)
    assert queue.unpark("other") == [unparked]
    assert (queue.next_unpark(), queue.peek()) == (5.0, unparked)
    queue.advance(4.9)
    assert admitted(queue) == [unparked]
    queue.advance(5.0)
    assert (queue.next_unpark(), queue.peek()) == (math.inf, hurried)
    assert queue.unpark("name") == [patient]
    assert admitted(queue) == [hurried, patient]


def test_who_is_parked_again_on_another_name_goes_on_once() -> None:
    queue = WaitingQueue()
    sequence = waiting(queue, due=1.0)
    for name in (b"name", (b"name", b"", (1, 2))):
        queue.park(name, until=1.0)
        assert queue.next_unpark() == 1.0
        if name == b"name":
            queue.unpark(name)
    queue.advance(1.0)
    assert admitted(queue) == [sequence]


def test_who_leaves_is_skipped_and_who_is_parked_waits() -> None:
    queue = WaitingQueue()
    gone, parked, dropped, last = (waiting(queue, due=i) for i in range(4))
    assert queue.discard(gone)
    assert not queue.discard(gone)
    assert queue.peek() is parked
    queue.park("name")
    assert queue.peek() is dropped
    queue.park("name")
    assert queue.discard(dropped)
    assert queue.peek() is last
    assert queue.unpark("other") == []
    assert queue.unpark("name") == [parked]
    assert admitted(queue) == [parked, last]
