"""A device that computes as late as allowed: what a host does too early, or omits, gives wrong numbers."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.kernels.common.lang import launched
from diptych.kernels.elementwise.rms_norm import add_rms_norm
from diptych.workers.device.fake_device import CaptureError, FakeDevice

ROOT = Path(__file__).parents[3]


def test_a_lane_computes_when_somebody_waits() -> None:
    device = FakeDevice()
    lane, done = device.lane("main"), list[int]()
    for i in range(3):
        lane.run(lambda i=i: done.append(i))
    early = lane.record()
    lane.run(lambda: done.append(3))
    assert done == []
    early.wait()
    assert done == [0, 1, 2]
    early.wait()
    device.synchronize()
    assert done == [0, 1, 2, 3]


def test_a_lane_that_goes_after_another_has_it_compute() -> None:
    device = FakeDevice()
    one, two, done = device.lane("one"), device.lane("two"), list[str]()
    one.run(lambda: done.append("one"))
    event = one.record()
    one.run(lambda: done.append("later"))
    two.run(lambda: done.append("before"))
    two.after(event)
    two.run(lambda: done.append("two"))
    two.record().wait()
    assert done == ["before", "one", "two"]


def test_lanes_that_wait_for_each_other_are_told() -> None:
    device = FakeDevice()
    one, two = device.lane("one"), device.lane("two")
    ends = [one.record(), two.record()]
    one.after(two.record())
    ends = [one.record(), two.record()]
    two.after(ends[0])
    one.after(two.record())
    last = one.record()
    two.after(last)
    two.record().wait()  # a chain is no circle
    lane = device.lane("three")
    lane.run(lambda: lane.record().wait())
    with pytest.raises(RuntimeError, match="waits for itself"):
        lane.record().wait()


def copy_through(is_late: bool, *, overwrites: bool, writes_late: bool = False) -> list[float]:
    device = FakeDevice(is_late=is_late)
    lane, host = device.lane("main"), device.pinned((2,), torch.float32)
    target, back = torch.zeros(2), device.pinned((2,), torch.float32)
    if not writes_late:
        host[:] = torch.tensor([1.0, 2.0])
    lane.run(lambda: target.copy_(host, non_blocking=True))
    lane.run(lambda: back.copy_(target, non_blocking=True))
    event = lane.record()
    if writes_late:
        host[:] = torch.tensor([1.0, 2.0])
    if overwrites:
        host[:] = 9.0
    event.wait()
    return back.tolist()


def test_pinned_memory_that_is_overwritten_too_early_is_seen() -> None:
    assert copy_through(True, overwrites=False) == [1.0, 2.0]
    assert copy_through(True, overwrites=True) == [9.0, 9.0]
    assert copy_through(False, overwrites=False, writes_late=True) == [0.0, 0.0]


def test_an_order_that_was_forgotten_is_seen() -> None:
    def read(*, is_ordered: bool) -> float:
        device = FakeDevice()
        one, two, x, seen = device.lane("one"), device.lane("two"), torch.zeros(1), torch.zeros(1)
        one.run(lambda: x.fill_(5.0))
        if is_ordered:
            two.after(one.record())
        two.run(lambda: seen.copy_(x))
        two.record().wait()
        return float(seen)

    assert (read(is_ordered=True), read(is_ordered=False)) == (5.0, 0.0)


def test_what_goes_wrong_reaches_who_waits() -> None:
    device = FakeDevice()
    lane = device.lane("main")
    lane.run(lambda: torch.zeros(2) @ torch.zeros(3))
    event = lane.record()
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        event.wait()
    event.wait()


def graph_of(work: Callable[[], object]) -> Callable[[], None]:
    device = FakeDevice()
    lane = device.lane("main")
    replay = device.capture(lane, work)

    def run() -> None:
        lane.run(replay)
        lane.record().wait()

    return run


def test_a_graph_repeats_operations_views_and_changes_in_place() -> None:
    x, index, out = torch.arange(12.0).view(3, 4), torch.tensor([1]), torch.zeros(4)
    scale = 2.0

    def work() -> None:
        row = x.index_select(0, index).view(4)
        row[1:3] += 10.0
        first, second = (row * scale).split(2)
        out[:2].copy_(second)
        out[2:] = first.relu().contiguous()

    replay = graph_of(work)
    scale = 100.0  # frozen
    for place in (0, 2, 1):
        index.fill_(place)
        x.copy_(torch.arange(12.0).view(3, 4) + place)
        out.zero_()
        replay()
        row = (torch.arange(12.0).view(3, 4) + place)[place]
        row[1:3] += 10.0
        assert torch.equal(out, torch.cat((row[2:], row[:2])) * 2.0)


def test_a_graph_repeats_copies_that_might_have_been_views() -> None:
    x, out = torch.arange(6.0).view(2, 3), torch.zeros(6, dtype=torch.int64)
    replay = graph_of(lambda: out.copy_(x.mT.reshape(6).to(torch.int64)))
    x.add_(10.0)
    replay()
    assert out.tolist() == [10, 13, 11, 14, 12, 15]


def test_a_graph_repeats_launches() -> None:
    x, residual, weight, out = (torch.randn(3, 8) for _ in range(4))
    weight, times = weight[0], list[int]()

    def twin(a: Tensor, b: Tensor) -> Tensor:
        times.append(int(a[0, 0].item()))  # a kernel's torch reference may read values
        return a + b

    def work() -> None:
        normed = add_rms_norm(x, residual, weight, 1e-6)
        out.copy_(launched(twin, normed, residual))

    replay = graph_of(work)
    x.copy_(torch.randn(3, 8))
    before = residual.clone()
    replay()
    expected = add_rms_norm(x, before, weight, 1e-6)
    assert torch.equal(residual, before) and torch.equal(out, expected + before)
    assert len(times) == 2


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: bool((x > 0).all()),
        lambda x: int(x.argmax()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: x * x.new_tensor(2.0),
        lambda x: x.repeat_interleave(torch.ones(2, dtype=torch.int64)),
        lambda x: torch.where(x > 0),
        lambda x: x.argwhere(),
        lambda x: x.nonzero(as_tuple=True),
        lambda x: x.unique(),
        lambda x: x.unique(dim=0),
        lambda x: x.unique_consecutive(),
        lambda x: x.allclose(x),
        lambda x: x[[0, 1]],
        lambda x: x.view(1, 2)[:, [0, 1]],
        lambda x: x[np.array([0, 1])],
        lambda x: x.__setitem__([0, 1], 2.0),
        lambda x: x.to("cpu", copy=True),
        lambda x: x.to(torch.device("cpu")),
        lambda x: x.to(device="cpu", dtype=torch.float64),
    ],
)
def test_a_graph_holds_nothing_that_waits(reads: Callable[[Tensor], object]) -> None:
    x = torch.tensor([1.0, -1.0])
    with pytest.raises(CaptureError):
        graph_of(lambda: reads(x))
    reads(x)  # outside of a capture it may


def test_a_graph_may_index_by_tensors_and_choose() -> None:
    x, index, out = torch.arange(6.0).view(2, 3), torch.tensor([1, 0]), torch.zeros(2)

    def work() -> None:
        picked = x[index, 1:][:, -1].to(torch.float32).to(x)
        out[...] = torch.where(picked > 3, picked, 0.0)

    replay = graph_of(work)
    index.fill_(1)
    replay()
    assert out.tolist() == [5.0, 5.0]


INTERPRETED = """
import triton
import torch
from diptych.kernels.elementwise.rms_norm import rms_norm, rms_norm_twin
from diptych.workers.device.fake_device import FakeDevice

x, weight, out = torch.zeros(3, 8), torch.ones(8), torch.zeros(3, 8)
device = FakeDevice()
lane = device.lane("main")
replay = device.capture(lane, lambda: out.copy_(rms_norm(x + 1.0, weight, 1e-6)))
x.copy_(torch.arange(24.0).view(3, 8))
weight.fill_(3.0)
lane.run(replay)
lane.record().wait()
torch.testing.assert_close(out, rms_norm_twin(x + 1.0, weight, 1e-6))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_graph_repeats_interpreted_kernels() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "DIPTYCH_TRITON": "interpret"}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=env, cwd=ROOT)
