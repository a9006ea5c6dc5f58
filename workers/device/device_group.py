"""The ranks of one worker on GPUs: what they say to each other is work of their devices, in one order on all of them.

NcclGroup      GPUs, by NCCL, on the stream that is current; graphs may hold its calls. Where they were found to be
               faster, small messages are added up in memory that all GPUs map (symmetric_sums.py)
FakeGroup      fake devices, by gloo, each call as a fake device captures the launch of a kernel

What rank 0 tells the others of a step goes another way (groups.py's GlooGroup): it is told before the one ahead of it
is computed.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import AllreduceOptions, AllToAllOptions, BroadcastOptions, ReduceScatterOptions

from ...kernels.common.lang import launched
from ..common.errors import ConfigError, PeerLost, RankLost
from ..common.exit_codes import exit_code
from ..parallel.groups import GlooGroup, Group
from ..parallel.stores import STALL, NetworkPlace, Place, place_beside, store_at
from ..parallel.symmetric_sums import SymmetricSums, why_not_symmetric

CLOSE_TIMEOUT_S = 10.0
END_S = 10.0  # for a worker to end by itself once a rank is lost, and for its GPU to come to an end
SETTINGS = {  # of NCCL and of torch's threads, unless they are set in the environment
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # it would wait for ever for the rendezvous file, which is deleted
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    # rank_processes.py detects a lost rank and ends the worker with a named error; torch would abort this process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
ON_ONE_MACHINE = {"NCCL_SOCKET_IFNAME": "lo"}  # no other machine may reach the ranks

log = logging.getLogger("diptych.worker")


class DeviceGroup(Group, Protocol):
    """A Group whose calls are device work: they return at once, or raise PeerLost."""

    sums: SymmetricSums | None  # None: the ranks have no memory that all of them map

    def all_gather(self, part: Tensor) -> Tensor:
        """part: [R, W] contiguous, the same shape on every rank. Returns all parts in their order, [n R, W]."""
        ...

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """parts: [n R, W] contiguous, R rows for each rank; may be overwritten. Returns the sum of what all have for
        this one, [R, W]."""
        ...

    def abandon(self) -> None:
        """A rank is gone: no device waits for it any longer, and what it would have brought is missing; or, where a
        device cannot be told, the process ends soon. From any thread."""
        ...


class NcclGroup:
    """Make it with `join`."""

    def __init__(self, rank: int, size: int, nccl: Any, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self.sums: SymmetricSums | None = None
        self._nccl: Any = nccl
        self._mark = torch.zeros(1, device=device)

    @classmethod
    def join(cls, rank: int, size: int, place: Place, device: torch.device) -> "NcclGroup":
        """Waits until all ranks are here. place: see GlooGroup.join. Raises PeerLost, or ConfigError where torch
        has no NCCL."""
        if not distributed.is_nccl_available():
            raise ConfigError("this build of torch has no NCCL, which ranks on GPUs need: install a build with NCCL")
        torch_nccl: Any = distributed.ProcessGroupNCCL
        for name, value in (SETTINGS | ({} if isinstance(place, NetworkPlace) else ON_ONE_MACHINE)).items():
            os.environ.setdefault(name, value)
        try:
            options = torch_nccl.Options()
            options._timeout = STALL
            group = cls(rank, size, torch_nccl(store_at(place), rank, size, options), device)
            group.meet()  # its communicator is made by its first call, which no graph can hold
            torch.cuda.synchronize(device)
        except RuntimeError as e:
            raise PeerLost(f"rank {rank} of {size} could not connect to the others with NCCL: {e}") from e
        why = "ranks are on several machines" if isinstance(place, NetworkPlace) else ""
        group.sums = meet_in_memory(group, place, device, why or why_not_symmetric(rank, size, device))
        return group

    def all_reduce(self, part: Tensor) -> Tensor:
        if self.sums is not None and (total := self.sums.all_reduce(part)) is not None:
            return total
        part, options = part.contiguous(), AllreduceOptions()
        options.asyncOp = False  # on the current stream
        self._call(self._nccl.allreduce, [part], options)
        return part

    def broadcast(self, tensor: Tensor, *, patient: bool = False) -> None:
        options = BroadcastOptions()
        options.rootRank, options.asyncOp = 0, False
        self._call(self._nccl.broadcast, [tensor], options)

    def gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """shapes: [R, n] each. NCCL has one length for all: shorter parts are padded, by a token at most."""
        assert part.shape == shapes[self.rank]
        rows, most = len(part), max(n for _, n in shapes)
        padded = part if part.shape[1] == most else torch.nn.functional.pad(part, (0, most - part.shape[1]))
        gathered, options = part.new_empty(self.size, rows, most), AllgatherOptions()
        options.asyncOp = False
        self._call(self._nccl._allgather_base, gathered, padded.contiguous(), options)
        return [of[:, :n] for of, (_, n) in zip(gathered, shapes, strict=True)] if self.rank == 0 else []

    def all_to_all(self, rows: Tensor, to_counts: Sequence[int], from_counts: Sequence[int]) -> Tensor:
        received, options = rows.new_empty(sum(from_counts), *rows.shape[1:]), AllToAllOptions()
        options.asyncOp = False
        self._call(self._nccl.alltoall_base, received, rows, [*from_counts], [*to_counts], options)
        return received

    def all_gather(self, part: Tensor) -> Tensor:
        gathered, options = part.new_empty(self.size * len(part), part.shape[1]), AllgatherOptions()
        options.asyncOp = False
        self._call(self._nccl._allgather_base, gathered, part, options)
        return gathered

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        own, options = parts.new_empty(len(parts) // self.size, parts.shape[1]), ReduceScatterOptions()
        options.asyncOp = False
        self._call(self._nccl._reduce_scatter_base, own, parts, options)
        return own

    def meet(self) -> None:
        self.all_reduce(self._mark)

    def abandon(self) -> None:
        self._aborting()
        if self.sums is not None:
            device = self._mark.device
            watch = partial(end_if_stuck, lambda: torch.cuda.synchronize(device))
            threading.Thread(target=watch, name="diptych-stuck-gpu", daemon=True).start()

    def close(self) -> None:
        # What ends a communicator when its process ends aborts the process (seen on an H200).
        self._aborting().join(CLOSE_TIMEOUT_S)

    def _aborting(self) -> threading.Thread:
        # It ends once no graph contains a call of this group, and threads that wait for such calls are released.
        thread = threading.Thread(target=self._abort, name="diptych-nccl-abort", daemon=True)
        thread.start()
        return thread

    def _abort(self) -> None:
        with suppress(RuntimeError):
            self._nccl.abort()

    def _call(self, call: Any, *arguments: object) -> None:
        try:
            call(*arguments)
        except RuntimeError as e:
            raise PeerLost(f"rank {self.rank} of {self.size} lost another rank: {e}") from e


class FakeGroup:
    """`gloo`: of these calls alone."""

    def __init__(self, gloo: GlooGroup) -> None:
        self.rank, self.size = gloo.rank, gloo.size
        self.sums: SymmetricSums | None = None
        self._gloo = gloo

    def all_reduce(self, part: Tensor) -> Tensor:
        if self.sums is not None and (total := self.sums.all_reduce(part)) is not None:
            return total
        return launched(self._gloo.all_reduce, part)

    def broadcast(self, tensor: Tensor, *, patient: bool = False) -> None:
        launched(self._gloo.broadcast, tensor)

    def gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return launched(self._gloo.gather, part, shapes)

    def all_to_all(self, rows: Tensor, to_counts: Sequence[int], from_counts: Sequence[int]) -> Tensor:
        return launched(self._gloo.all_to_all, rows, to_counts, from_counts)

    def all_gather(self, part: Tensor) -> Tensor:
        counts = [len(part)] * self.size
        return launched(self._gloo.all_to_all, part.repeat(self.size, 1), counts, counts)

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        return launched(self._gloo.all_reduce, parts).chunk(self.size)[self.rank]

    def meet(self) -> None:
        launched(self._gloo.all_reduce, torch.ones(1))

    def abandon(self) -> None:
        self._gloo.abandon()

    def close(self) -> None:
        self._gloo.close()


def meet_in_memory(
    group: NcclGroup | FakeGroup, place: Place, device: torch.device, why_not: str
) -> SymmetricSums | None:
    """Map memory of all ranks on each; None, on all, where one of them cannot. why_not: why this one cannot, if that is
    known."""
    sums: SymmetricSums | None = None
    num_unable = _num_unable(group, device, bool(why_not))
    if not num_unable:
        store = store_at(place_beside(place, "symmetric"))
        try:
            sums = SymmetricSums.meet(f"diptych-{place}", group.rank, group.size, store, device)
        except (AttributeError, RuntimeError) as e:
            why_not = str(e).partition("\n")[0]
        num_unable = _num_unable(group, device, sums is None)
    if not num_unable:
        return sums
    text = "rank %d: NCCL adds up all messages between ranks, without symmetric memory: %s"
    if group.rank == 0:
        log.info(text, group.rank, why_not or "another rank cannot, and says why")
    elif why_not and num_unable < group.size:  # these processes log warnings alone
        log.warning(text, group.rank, why_not)
    return None


def _num_unable(group: NcclGroup | FakeGroup, device: torch.device, is_unable: bool) -> int:
    return int(group.all_reduce(torch.tensor([float(is_unable)], device=device)).item())


def end_if_stuck(wait_for_device: Callable[[], object]) -> None:
    """End the process, unless it does so itself, where its device does not come to an end once a rank is lost: a kernel
    that waits in symmetric memory waits for ever, and so does each thread that waits for it."""
    time.sleep(END_S)  # a worker that can end has ended by then
    has_come = threading.Event()

    def wait() -> None:
        with suppress(RuntimeError):  # a device that is lost does not hold anybody up
            wait_for_device()
        has_come.set()

    threading.Thread(target=wait, name="diptych-stuck-gpu-wait", daemon=True).start()
    if not has_come.wait(END_S):
        error = RankLost("the GPU waits for a rank that is lost, and cannot be told: the process ends")
        log.error("%s", error)
        sys.stderr.flush()
        os._exit(exit_code(error))
