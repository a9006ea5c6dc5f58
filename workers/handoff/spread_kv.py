"""The KV pool of a worker whose ranks are on several machines, as hand-offs use it at rank 0: each machine has its own
ranks' part.

    read      runs ──cut at ranks──> ours ─────────────────> read here        ──> joined in the runs' order
                                     another machine's ────> a command to it
    convert   a staged part ───────> the heads of our ranks, here
                            ───────> to each machine, of the part what its ranks use; converted there

All machines do their part at one time. No region of memory has the whole pool, so transports that get at memory
themselves cannot be used: gRPC carries what moves.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np

from ...proto import kv_pb2
from ..kv.bridge import Bridge
from ..kv.device_kv import CudaDriver, Staged
from ..kv.layout import PoolMemory, Region, Runs
from ..kv.memory import KVMemory
from ..kv.staging import STAGING_BYTES, Staging
from .machine_link import MachineLink

NUM_BRIDGES = 16  # that are kept for each machine, by the source's layout

Result = TypeVar("Result")


class SpreadKV:
    """A DeviceKV. What fails raises TransportError, once no machine reads or writes for it any more."""

    is_on_one_machine = False

    def __init__(self, own: KVMemory, links: Sequence[MachineLink], staging_bytes: int = STAGING_BYTES) -> None:
        """own: this machine's part of the pool, of the first ranks; links: to the other machines, in the order of their
        ranks. staging_bytes: where `own` is on no device, which has buffers of its own."""
        layout, ranks = own.layout, [own.held_ranks, *(link.ranks for link in links)]
        assert [rank for of in ranks for rank in of] == list(range(layout.tensor_parallel)), ranks
        self._own, self._links = own, links
        self._rank_bytes = own.num_blocks * layout.rank_block_bytes
        self._starts = [of.start * self._rank_bytes for of in ranks]  # in the pool, of each machine's part
        self._machines = np.repeat(np.arange(len(ranks)), [len(of) for of in ranks])  # by rank
        unseen = [PoolMemory(layout, own.num_blocks, _UNSEEN, ranks=of) for of in ranks[1:]]
        self._bridges = [lru_cache(NUM_BRIDGES)(partial(Bridge, of)) for of in (own, *unseen)]
        self._threads = [ThreadPoolExecutor(1, f"diptych-machine-of-rank-{link.ranks.start}") for link in links]
        self._staging = Staging(staging_bytes) if own.device is None else own.device.staging

    @property
    def memory(self) -> KVMemory:
        """KV memory of all ranks, for hand-offs. Its region is this machine's part, which host code must not use."""
        region = replace(self._own.region, view=None, pieces=None, file=None)
        return KVMemory(self._own.layout, self._own.num_blocks, region, self)

    @property
    def driver(self) -> CudaDriver | None:
        return None

    @property
    def staging(self) -> Staging:
        return self._staging

    def read(self, runs: Runs) -> bytes:
        cut = runs.cut(self._rank_bytes)
        machines = self._machines[cut.offsets // self._rank_bytes]
        found = self._at_once({i: self._reading(i, cut, machines == i) for i in np.unique(machines).tolist()})
        if len(found) == 1:
            [only] = found.values()
            return only
        firsts = np.flatnonzero(np.diff(machines, prepend=-1))  # of runs of one machine that follow each other
        sizes = np.add.reduceat(cut.lengths, firsts) if len(firsts) else cut.lengths
        rest = {i: memoryview(data) for i, data in found.items()}
        parts: list[memoryview] = []
        for i, size in zip(machines[firsts].tolist(), sizes.tolist(), strict=True):
            parts.append(rest[i][:size])
            rest[i] = rest[i][size:]
        return b"".join(parts)

    def fetch(self, staged: Staged) -> memoryview:
        assert not staged.is_on_device
        return self._staging.view[staged.start : staged.start + staged.num_bytes]

    def convert(self, bridge: Bridge, staged: Staged, table: Sequence[int], first_token: int) -> None:
        wire_dtype = "" if bridge.wire == bridge.source.dtype else bridge.wire
        own, *others = (of(bridge.source, bridge.num_pool_blocks, wire_dtype) for of in self._bridges)
        message = kv_pb2.StagedPart(
            layout=bridge.source.to_proto(),
            num_pool_blocks=bridge.num_pool_blocks,
            wire_dtype=wire_dtype,
            part=replace(staged.part, checksum=b"").to_proto(),
            table=table,
            first_token=first_token,
        )
        data = self.fetch(staged)

        def convert_here() -> None:
            if self._own.device is not None:
                self._own.device.convert(own, staged, table, first_token)
            else:
                own.convert(data, staged.part, table, first_token)

        work: dict[int, Callable[[], None]] = {0: convert_here}
        for i, (link, there) in enumerate(zip(self._links, others, strict=True), 1):
            if payload := [data[of.used] for of in there.used_slices_of(staged.part)]:
                work[i] = partial(link.convert, message, payload)
        self._at_once(work)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to), within the other machines' parts of the pool. Only a source may stand in two
        pairs."""
        self._at_once({i: partial(link.copy_blocks, pairs) for i, link in enumerate(self._links, 1)})

    def run(self, work: Callable[[], object]) -> None:
        raise AssertionError("no transport has work for the devices of several machines")

    def close(self) -> None:
        """End the connections to the other machines; what is under way fails."""
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.shutdown()

    def _reading(self, machine: int, cut: Runs, is_there: np.ndarray) -> Callable[[], bytes]:
        """Prepare a read of those runs that are there. cut: at the parts of ranks; is_there: [runs] bool."""
        runs = Runs(cut.offsets[is_there] - self._starts[machine], cut.lengths[is_there]).merged()
        return partial(self._links[machine - 1].read, runs) if machine else lambda: b"".join(self._own.read(runs))

    def _at_once(self, work: Mapping[int, Callable[[], Result]]) -> dict[int, Result]:
        """Do work by machines, that of the first (0) on this thread. Returns, or raises an error of it, when all is
        done."""
        others = {i: self._threads[i - 1].submit(of) for i, of in work.items() if i}
        try:
            own = {i: of() for i, of in work.items() if not i}
        finally:
            wait(others.values())
        return own | {i: future.result() for i, future in others.items()}


_UNSEEN = Region(0, 0, None)  # of another machine
