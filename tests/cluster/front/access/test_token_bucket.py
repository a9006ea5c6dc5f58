"""Token buckets, with the time given."""

import math
from copy import copy

from hypothesis import given
from hypothesis import strategies as st

from diptych.cluster.front.access.token_bucket import ROUNDING, TokenBucket


def test_it_is_full_at_the_start_and_refills_evenly() -> None:
    bucket = TokenBucket(60.0, 100.0)
    assert bucket.wait_s(60, 100.0) == 0.0 and bucket.wait_s(61, 100.0) == math.inf
    bucket.take(60, 100.0)
    assert bucket.wait_s(1, 100.0) == 1.0 and bucket.full_in_s(100.0) == 60.0
    assert bucket.wait_s(1, 100.5) == 0.5 and bucket.wait_s(1, 101.0) == 0.0
    assert bucket.level(1000.0) == 60.0


def test_what_was_used_beyond_it_is_waited_for() -> None:
    bucket = TokenBucket(60.0, 0.0)
    bucket.take(90, 0.0)
    assert bucket.level(0.0) == -30.0 and bucket.wait_s(1, 0.0) == 31.0
    bucket.take(-200, 0.0)  # given back
    assert bucket.level(0.0) == 60.0


def test_a_share_below_one_still_holds_one() -> None:
    bucket = TokenBucket(0.25, 0.0, least=1.0)
    bucket.take(1, 0.0)
    assert bucket.wait_s(1, 0.0) == 240.0


def test_another_rate_forgives_nothing() -> None:
    bucket = TokenBucket(60.0, 0.0)
    bucket.take(50, 0.0)
    bucket.resize(600.0, 0.0)
    assert bucket.level(0.0) == 550.0 and bucket.capacity == 600.0
    bucket.resize(30.0, 0.0)
    assert bucket.level(0.0) == -20.0


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), max_size=60),
)
def test_a_minute_gives_twice_the_limit_at_most_and_waits_are_true(limit: int, asked: list[tuple[float, int]]) -> None:
    bucket, now, taken = TokenBucket(limit, 0.0), 0.0, list[tuple[float, int]]()
    for after_s, num in asked:
        now += after_s
        wait_s = bucket.wait_s(num, now)
        if wait_s == math.inf:
            assert num > limit
        elif wait_s:
            assert num - copy(bucket).level(now + wait_s) <= ROUNDING
        else:
            bucket.take(num, now)
            taken.append((now, num))
    for start, _ in taken:
        assert sum(num for at, num in taken if start <= at <= start + 60.0) <= 2 * limit + 1e-3
