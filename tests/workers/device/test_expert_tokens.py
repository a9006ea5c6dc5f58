"""Counts of tokens per expert, read from a device without waiting for it."""

import torch

from diptych.workers.device.expert_tokens import ExpertTokens
from diptych.workers.device.fake_device import FakeDevice


def test_a_question_is_answered_by_what_the_one_before_has_fetched() -> None:
    device, counts = FakeDevice(), torch.zeros(2, 3, dtype=torch.int64)
    lane = device.lane("main")
    tokens = ExpertTokens(device, lane, counts)
    lane.run(lambda: counts[1, 2].add_(5))
    assert tokens.latest().tolist() == [[0, 0, 0], [0, 0, 0]]
    assert tokens.latest().tolist() == [[0, 0, 0], [0, 0, 0]], "the device is not there yet"
    device.synchronize()
    lane.run(lambda: counts[0, 0].add_(1))
    found = tokens.latest()
    assert found.tolist() == [[0, 0, 0], [0, 0, 5]]
    device.synchronize()
    assert tokens.latest().tolist() == [[1, 0, 0], [0, 0, 5]]
    assert found.tolist() == [[0, 0, 0], [0, 0, 5]], "what was told stays"


def test_of_a_device_that_is_lost_the_last_is_told() -> None:
    device, counts = FakeDevice(is_late=False), torch.full((1, 2), 7)
    tokens = ExpertTokens(device, device.lane("main"), counts)
    tokens.latest()
    device.is_lost = True
    assert [tokens.latest().tolist() for _ in range(2)] == [[[7, 7]], [[7, 7]]]
