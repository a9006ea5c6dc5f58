"""KV from one process to another by CUDA IPC and NIXL: every byte checked, and bytes a second beside a device copy.

    python -m benchmarks.gpu.report.handoff [--device cuda]

The source process makes a pool of known numbers and publishes its endpoints; this one reads it by a worker's own
transports (workers/transport/cuda_ipc.py, nixl.py): one block, for what a read costs however short, then all of it,
once whole and once in shuffled blocks, as hand-offs do; by CUDA IPC in shuffled layers of blocks too. On a GPU the
kernel that copies such lists (kernels/kv/run_copy.py) is then timed by itself, within this process, for runs of several
sizes and for several numbers of programs. On a fake device (tests/support/gpu/fake_cuda.py) bytes cross between
processes' memory, and rates mean nothing; NIXL, which knows no such device, is left out.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from diptych.kernels.kv.run_copy import copy_runs_triton, list_of
from diptych.proto import kv_pb2
from diptych.workers.common.errors import TransportError
from diptych.workers.common.garbage import leave
from diptych.workers.device.cuda_device import CudaDevice
from diptych.workers.device.kv_cache import KVCache
from diptych.workers.kv.layout import Copies, KVLayout
from diptych.workers.kv.memory import KVMemory
from diptych.workers.transport.base import KVReader, Source, Transport
from diptych.workers.transport.cuda_ipc import CudaIpcTransport
from diptych.workers.transport.nixl import NixlTransport

from .rows import PROBLEM, SKIPPED, put

ON_GPU = KVLayout("bfloat16", block_size=16, num_layers=32, num_kv_heads=8, head_dim=128, model_id="8b")
ON_FAKE = KVLayout("bfloat16", block_size=16, num_layers=2, num_kv_heads=2, head_dim=16, model_id="tiny")
NUM_BLOCKS = {"cuda": 1024, "fake": 64}  # 2 GiB on a GPU: a context of 16k
REPEATS = 7
RUN = ("-m", "benchmarks.gpu.report.handoff")
WHOLE, BLOCKS, LAYERS = "whole", "shuffled blocks", "shuffled layers of blocks"
LISTED_BYTES, MOST_LISTED = (2 << 20, 64 << 10, 4 << 10, 256), 100_000  # of a run, and runs of a list


class Pool:
    """KV of one process: memory that others can map, and its bytes as a tensor, [n] uint8."""

    def __init__(self, device: str) -> None:
        self.layout, self.num_blocks = (ON_FAKE if device == "fake" else ON_GPU), NUM_BLOCKS[device]
        if device == "fake":
            from tests.support.gpu.fake_cuda import make_device_memory, seen_by_host

            self.memory: KVMemory = make_device_memory(self.layout, self.num_blocks)
            view = seen_by_host(self.memory).region.view
            assert view is not None
            self.bytes = torch.frombuffer(view, dtype=torch.uint8)
        else:
            gpu = CudaDevice(torch.device("cuda"))
            self.cache = KVCache(self.layout, self.num_blocks, gpu.torch_device, gpu=gpu)
            self.memory = self.cache.memory
            self.bytes = self.cache.tensor.view(-1).view(torch.uint8)
        assert self.bytes.nbytes == self.memory.region.num_bytes

    def fill(self, of: Tensor | None = None) -> None:
        """Write known numbers, or those of `of`."""
        self.bytes.copy_(self.known() if of is None else of)
        if self.bytes.is_cuda:
            torch.cuda.synchronize()

    def known(self) -> Tensor:
        """The same in every process, [n] uint8: no two blocks are alike."""
        words = torch.arange(self.bytes.nbytes // 4, dtype=torch.int64, device=self.bytes.device)
        return ((words * 2_654_435_761) & 0x7FFF_FFFF).to(torch.int32).view(torch.uint8)

    def transports(self) -> Iterator[Transport]:
        """Make the transports, CUDA IPC first; NIXL where it is installed and works. Raises TransportError where the
        memory cannot be shared."""
        device = self.memory.device
        assert device is not None and device.driver is not None, "there is no CUDA driver's library"
        yield CudaIpcTransport(self.memory.region, device, device.driver)
        if not self.bytes.is_cuda:
            return
        try:
            yield NixlTransport([self.memory.region], device.driver)
        except (ImportError, TransportError) as e:
            put(SKIPPED, what="NIXL", why=str(e))


def serve(device: str) -> None:
    """Offer a pool of known numbers until stdin ends. The work of the source process."""
    pool = Pool(device)
    pool.fill()
    opened = kv_pb2.Opened(source_incarnation="source")
    transports = list(pool.transports())
    for transport in transports:
        transport.publish(opened)
        transport.serve(1)
    print(json.dumps({"opened": opened.SerializeToString().hex()}), flush=True)
    sys.stdin.read()


@contextmanager
def source_process(device: str) -> Iterator[kv_pb2.Opened]:
    argv = (sys.executable, *RUN, "--device", device, "--serve")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the source process ended (exit status {process.wait()})")
            yield kv_pb2.Opened.FromString(bytes.fromhex(json.loads(line)["opened"]))
        finally:
            process.stdin.close()
            process.wait(20)


def copies_of(pool: Pool, what: str) -> tuple[Copies, Tensor]:
    """Copies of the whole pool, and which run of the source each of ours then is, [runs] int64."""
    size = {WHOLE: pool.bytes.nbytes, BLOCKS: pool.layout.block_bytes, LAYERS: pool.layout.layer_bytes}[what]
    order = list(range(pool.bytes.nbytes // size))
    random.Random(9).shuffle(order)
    table = np.array(order, dtype=np.int64)
    local = np.arange(len(order), dtype=np.int64) * size
    return Copies(table * size, local, np.full(len(order), size, dtype=np.int64)), torch.tensor(order)


async def measure(device: str) -> bool:
    """Put a row for each transport and kind of read; return whether all bytes were right."""
    pool, is_right = Pool(device), True
    copy_s = await asyncio.to_thread(_copy_seconds, pool)
    put("reads", what="copy on the device", **_rate(pool.bytes.nbytes, copy_s, copy_s))
    with source_process(device) as opened:
        for transport in pool.transports():
            try:
                is_right &= await _measure(pool, transport, opened, copy_s)
            except TransportError as e:
                put(PROBLEM, what=transport.name, problem=str(e))
                is_right = False
            await transport.close()
    return await asyncio.to_thread(_time_lists, pool, copy_s) and is_right if pool.bytes.is_cuda else is_right


async def _measure(pool: Pool, transport: Transport, opened: kv_pb2.Opened, copy_s: float) -> bool:
    """Raises TransportError where the source cannot be reached or read."""
    if not transport.is_described(opened):
        raise TransportError("the source does not offer it")
    began, is_right = time.perf_counter(), True
    reader = await transport.connect(Source("h0", "sink", opened, cast(Any, None)))
    put("reads", by=transport.name, what="connect", ms=1e3 * (time.perf_counter() - began))
    block = np.array([pool.layout.block_bytes], dtype=np.int64)
    seconds = [await _read_seconds(reader, Copies(block * 0, block * 0, block), pool) for _ in range(REPEATS)]
    put("reads", by=transport.name, what="one block", ms=1e3 * statistics.median(seconds))
    # NIXL is given each copy by itself: it would take seconds for as many as there are layers of blocks.
    for what in (WHOLE, BLOCKS, LAYERS) if transport.name == CudaIpcTransport.name else (WHOLE, BLOCKS):
        pool.bytes.zero_()
        copies, order = copies_of(pool, what)
        seconds = [await _read_seconds(reader, copies, pool) for _ in range(REPEATS)]
        expected = pool.known().view(len(order), -1)[order.to(pool.bytes.device)]
        right = torch.equal(pool.bytes.view(len(order), -1), expected)
        row = {"by": transport.name, "what": what, "bytes": "right" if right else "WRONG"}
        put("reads", **row, **_rate(pool.bytes.nbytes, statistics.median(seconds), copy_s))
        print(row, statistics.median(seconds), "s", flush=True)
        is_right &= right
    return is_right


async def _read_seconds(reader: KVReader, copies: Copies, pool: Pool) -> float:
    began = time.perf_counter()
    await reader.read(kv_pb2.Segment(), copies, pool.memory.region)
    return time.perf_counter() - began


def _rate(num_bytes: int, seconds: float, copy_s: float) -> dict[str, float]:
    return {
        "ms": 1e3 * seconds,
        "GB/s moved": num_bytes / seconds / 1e9,
        "GB/s read and written": 2 * num_bytes / seconds / 1e9,
        "of a copy on the device": copy_s / seconds,
    }


def _copy_seconds(pool: Pool) -> float:
    """Median of copies between two tensors as large as the pool, by the host's clock as reads are."""
    source, target, seconds = torch.zeros_like(pool.bytes), torch.zeros_like(pool.bytes), list[float]()
    for _ in range(REPEATS):
        began = time.perf_counter()
        target.copy_(source)
        if pool.bytes.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _time_lists(pool: Pool, copy_s: float) -> bool:
    """Put a row for each size of runs and number of programs: medians by the device's clock. Return whether all bytes
    were right."""
    target, is_right = torch.zeros_like(pool.bytes), True
    num_cores = torch.cuda.get_device_properties(target.device).multi_processor_count
    for size in LISTED_BYTES:
        num = min(pool.bytes.nbytes // size, MOST_LISTED)
        order, place = np.random.default_rng(9).permutation(num).astype(np.int64), np.arange(num, dtype=np.int64)
        addresses = target.data_ptr() + place * size, pool.bytes.data_ptr() + order * size
        listed = list_of(*addresses, np.full(num, size, dtype=np.int64))
        runs = torch.from_numpy(listed.numbers).to(target.device)
        expected = pool.bytes[: num * size].view(num, size)[torch.from_numpy(order).to(target.device)]
        for num_programs in (num_cores // 4, num_cores // 2, num_cores, 2 * num_cores):
            seconds = list[float]()
            for _ in range(REPEATS):
                target.zero_()  # which takes longer than the host does to launch what follows
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                copy_runs_triton(runs, listed.tile, listed.num_chunks, num_programs)
                ended.record()
                ended.synchronize()
                seconds.append(began.elapsed_time(ended) / 1e3)
            right = torch.equal(target[: num * size].view(num, size), expected)
            row = {"runs": num, "of bytes": size, "programs": num_programs, "bytes": "right" if right else "WRONG"}
            rate = _rate(num * size, statistics.median(seconds), copy_s * num * size / pool.bytes.nbytes)
            put("lists", **row, **rate)
            print(row, rate, flush=True)
            is_right &= right
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--serve", action="store_true", help="be the source")
    options = parser.parse_args()
    if options.serve:
        serve(options.device)
        return 0
    if asyncio.run(measure(options.device)):
        return 0
    put(PROBLEM, what="hand-off", problem="bytes are wrong, or a transport failed")
    return 1


if __name__ == "__main__":
    leave(main())
