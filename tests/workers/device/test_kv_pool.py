"""A pool on a device: copies to the host, and conversion of parts of segments into it."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.kernels.kv.kv_scales import KVParts, dequantise
from diptych.workers.common.errors import TransportError
from diptych.workers.device import kv_pool
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.device.kv_convert import Placing, place_of, rows_of
from diptych.workers.kv.bridge import Bridge
from diptych.workers.kv.checksums import pool_checksums
from diptych.workers.kv.layout import BLOCK_MAJOR, DOT, LAYER_MAJOR, ROWS, SCALES_LAST, Runs
from diptych.workers.kv.packing import unpacked
from diptych.workers.kv.segment import Segment
from diptych.workers.kv.wire import narrow, widen

from ...support.gpu.fake_cuda import make_device_memory, seen_by_host
from ...support.handoff_pair import LARGE, SMALL, make_memory, memory_bytes


def some_runs(seed: int, num_bytes: int) -> Runs:
    rng = random.Random(seed)
    offsets = np.array([rng.randrange(num_bytes - 700) for _ in range(50)])
    return Runs(offsets, np.array([rng.randint(1, 700) for _ in offsets]))


def test_runs_are_read_in_order_whatever_a_buffer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "READ_BYTES", 1000)
    memory = make_device_memory(SMALL, 8, random.Random(1).randbytes(8 * SMALL.block_bytes))
    assert memory.device is not None
    runs = some_runs(1, memory.region.num_bytes)
    assert memory.device.read(runs) == memory_bytes(seen_by_host(memory), runs)
    assert memory.device.read(Runs(runs.offsets[:0], runs.lengths[:0])) == b""


class Copies(TorchDispatchMode):
    """Counts copies."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num_runs", "num_copies"), [(40, 1), (3, 3)])
def test_pieces_of_a_size_leave_the_device_in_one_copy(num_runs: int, num_copies: int) -> None:
    """Few are copied one by one."""
    data = random.Random(3).randbytes(8 * SMALL.block_bytes)
    memory = make_device_memory(SMALL, 8, data, device=FakeDevice(is_late=False))
    assert memory.device is not None
    num_units = memory.region.num_bytes // kv_pool.LEAST_UNIT
    offsets = np.random.default_rng(1).permutation(num_units - 2)[:num_runs] * kv_pool.LEAST_UNIT
    runs = Runs(offsets, np.tile([1, 2], num_runs)[:num_runs] * kv_pool.LEAST_UNIT)
    with Copies() as copies:
        assert memory.device.read(runs) == memory_bytes(seen_by_host(memory), runs)
    assert copies.num == num_copies


def test_threads_read_at_once() -> None:
    memory = make_device_memory(SMALL, 8, random.Random(2).randbytes(8 * SMALL.block_bytes))
    assert memory.device is not None
    asked = [some_runs(seed, memory.region.num_bytes) for seed in range(24)]
    with ThreadPoolExecutor(6) as threads:
        for runs, found in zip(asked, threads.map(memory.device.read, asked), strict=True):
            assert found == memory_bytes(seen_by_host(memory), runs)


@pytest.mark.parametrize("is_late", [True, False])
def test_work_that_fails_leaves_nothing_under_way_and_the_line_in_order(is_late: bool) -> None:
    """Whether it fails when it is given to the device, or (a late one) when it is waited for."""
    memory = make_device_memory(SMALL, 8, device=FakeDevice(is_late=is_late))
    assert memory.device is not None
    done: list[str] = []
    line = memory.device._in  # type: ignore[attr-defined]
    line._lane.run(lambda: done.append("before"))
    with pytest.raises(ZeroDivisionError):
        memory.device.run(lambda: 1 // 0)
    assert done == ["before"]
    memory.device.run(lambda: done.append("after"))
    assert done == ["before", "after"]


def test_a_copy_that_the_device_cannot_do_fails_the_transfer_by_name() -> None:
    memory = make_device_memory(SMALL, 8)
    assert memory.device is not None

    def copy() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(TransportError, match="the GPU could not copy KV: CUDA out of memory"):
        memory.device.run(copy)


def test_what_cannot_be_given_to_the_device_is_raised_once_what_was_given_before_is_over() -> None:
    memory = make_device_memory(SMALL, 8)
    assert memory.device is not None
    done: list[str] = []
    lane = memory.device._in._lane  # type: ignore[attr-defined]
    run = lane.run

    def run_half(work: object) -> None:
        run(lambda: done.append("half of it"))
        raise TransportError("cuMemcpyAsync failed")

    lane.run = run_half
    with pytest.raises(TransportError):
        memory.device.run(lambda: None)
    assert done == ["half of it"]
    lane.run = run
    memory.device.run(lambda: done.append("after"))
    assert done == ["half of it", "after"]


@pytest.mark.parametrize("layout", [LARGE, replace(LARGE, axis_order=LAYER_MAJOR, tensor_parallel=2)])
def test_checksums_are_those_of_host_memory(layout: object) -> None:
    assert isinstance(layout, type(LARGE))
    host = make_memory(layout, 96, seed=3)
    assert host.region.view is not None
    memory = make_device_memory(layout, 96, bytes(host.region.view))
    blocks = list(range(95, 5, -1))  # more than one part
    assert len(blocks) * 2 * layout.block_bytes // 3 > kv_pool.READ_BYTES
    assert pool_checksums(memory, blocks, 1, 2, layout.dtype) == pool_checksums(host, blocks, 1, 2, layout.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 4])
def test_dot_pieces_become_rows_as_on_the_host(dtype: str, heads: int) -> None:
    layout = replace(SMALL, dtype=dtype, block_size=32, head_dim=16, num_kv_heads=heads, packing=DOT)
    host = make_memory(layout, 2, seed=4)
    assert host.region.view is not None
    data = torch.frombuffer(bytearray(host.region.view), dtype=torch.uint8)
    found, _ = rows_of(data, layout, dtype, 2, layout.num_layers)
    expected = unpacked(np.frombuffer(host.region.view, np.uint16 if dtype == "bfloat16" else np.uint32), layout)
    assert found.contiguous().view(torch.uint8).numpy().tobytes() == expected.tobytes()


def widened(parts: KVParts) -> torch.Tensor:
    assert parts.scales is not None
    return dequantise(parts.numbers, parts.scales)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_scaled_vectors_are_widened_as_on_the_host(dtype: str) -> None:
    numbers = np.random.default_rng(5).normal(size=SMALL.block_bytes // 4).astype(np.float32)
    records = narrow(numbers.tobytes(), "float32", dtype, SMALL.head_dim)
    found = widened(rows_of(torch.frombuffer(bytearray(records), dtype=torch.uint8), SMALL, dtype, 1, SMALL.num_layers))
    assert np.array_equal(found.reshape(-1, SMALL.head_dim).numpy(), widen(records, dtype, "float32", SMALL.head_dim))


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("order", [BLOCK_MAJOR, LAYER_MAJOR])
@pytest.mark.parametrize("packing", [DOT, SCALES_LAST])
def test_a_pool_of_scaled_vectors_becomes_rows_as_on_the_host(dtype: str, order: str, packing: str) -> None:
    """Of the compiled kernels' packing, and of a GPU's: a GPU's sink unpacks and widens it."""
    layout = replace(LARGE, dtype=dtype, head_dim=32, axis_order=order, packing=packing)
    wide = replace(layout, dtype="float32", packing=ROWS)
    source, sink = make_memory(wide, 2), make_memory(layout, 2)
    numbers = np.random.default_rng(6).normal(size=source.region.num_bytes // 4).astype(np.float32)
    assert source.region.view is not None and sink.region.view is not None
    source.region.view[:] = numbers.tobytes()
    whole = Segment(0, (0, 1), (1, 1), 0, layout.num_layers)
    into = Bridge(sink, wide, 2)
    into.convert(memoryview(numbers.tobytes()), whole, (0, 1), 0)
    found = widened(rows_of(torch.frombuffer(bytearray(sink.region.view), dtype=torch.uint8), layout, dtype, 2, 3))
    back = make_memory(wide, 2)
    Bridge(back, layout, 2).convert(sink.region.view, whole, (0, 1), 0)
    assert back.region.view is not None
    rows = found if order == BLOCK_MAJOR else found.transpose(1, 2)
    assert rows.contiguous().numpy().tobytes() == bytes(back.region.view)
    assert np.abs(rows.flatten().numpy() - numbers).max() < {"int8": 0.02, "fp8": 0.2, "int4": 0.6}[dtype]


def test_tokens_are_placed_from_the_first_that_is_wanted_as_far_as_the_table_reaches() -> None:
    part = Segment(2, (5, 6), (1, 1), 0, 1)  # tokens 32 to 63, of blocks of 16
    table = list(range(100, 115))  # blocks of 4: 60 tokens
    assert place_of(part, 16, 4, table, 0) == Placing(32, 28, list(range(108, 115)), 32)
    assert place_of(part, 16, 4, table, 45) == Placing(45, 15, list(range(111, 115)), 44)
    assert place_of(part, 16, 4, table, 60) is None
    assert place_of(part, 16, 4, table[:8], 0) is None
