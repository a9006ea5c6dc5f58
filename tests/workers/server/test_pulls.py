"""The pulls of a worker."""

import pytest

from diptych.proto.worker_pb2 import HandoffSource
from diptych.workers.server.pulls import prefix_timeout_s


@pytest.mark.parametrize(("request_timeout_s", "expected"), [(600.0, 3.0), (12.0, 3.0), (4.0, 1.0), (0.5, 0.125)])
def test_a_prefix_may_take_a_part_of_the_time_that_its_request_has(request_timeout_s: float, expected: float) -> None:
    assert prefix_timeout_s(HandoffSource(), request_timeout_s) == expected
    computing = HandoffSource(is_computing=True)
    assert prefix_timeout_s(computing, request_timeout_s) == request_timeout_s / 2
