"""The ranks of one worker, or the workers that share experts, as each of them sees the others. Knows tensors; knows
neither layers nor processes.

A worker of `tensor_parallel` n is n ranks: each holds an equal share of the heads, of the MLP and of the vocabulary.
It embeds the tokens of its part of the vocabulary, computes every token of a step with its share, adds its part to the
others' after the embedding and twice a layer (Shoeybi et al. 2019, section 3), and makes its part of the logits, which
meet at rank 0. That alone samples.
"""

import math
import mmap
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import AllToAllOptions, BroadcastOptions

from ...kernels.cpu.library import Library
from ...kernels.cpu.ranks import Abandoned, RankSums
from ..common.errors import PeerLost
from .stores import STALL, Place, host_of, store_at

POLL = timedelta(seconds=1)  # after which who waits looks whether the group is abandoned
IDLE = timedelta(days=365)  # between two steps; the processes' own ends are watched elsewhere (rank_processes.py)


class Group(Protocol):
    """A method returns when this rank's part is done. Raises PeerLost where another rank does not do its own."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, part: Tensor) -> Tensor:
        """part: the same shape on every rank. Returns the sum, of part's dtype; may overwrite `part`."""
        ...

    def broadcast(self, tensor: Tensor, *, patient: bool = False) -> None:
        """Rank 0's `tensor` into that of every other rank, contiguous and of the same shape and dtype.

        `patient`: rank 0 may have nothing to say for as long as it likes.
        """
        ...

    def gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Every rank's `part`, in their order, at rank 0; elsewhere nothing. shapes: of all parts, of one dtype."""
        ...

    def all_to_all(self, rows: Tensor, to_counts: Sequence[int], from_counts: Sequence[int]) -> Tensor:
        """rows: [N, ...] contiguous, the first to_counts[0] of them for rank 0, and so on. from_counts: how many each
        rank has for this one. Returns those, by rank; of the shape and dtype that all ranks' rows have."""
        ...

    def meet(self) -> None:
        """Wait until all ranks have come."""
        ...

    def close(self) -> None:
        """Close the group: the others lose this rank in whatever they wait for. Idempotent."""
        ...


class Alone:
    """The group of a worker that is one process."""

    rank, size = 0, 1

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def broadcast(self, tensor: Tensor, *, patient: bool = False) -> None:
        return

    def gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return [part]

    def all_to_all(self, rows: Tensor, to_counts: Sequence[int], from_counts: Sequence[int]) -> Tensor:
        return rows

    def meet(self) -> None:
        return

    def close(self) -> None:
        return


class GlooGroup:
    """Ranks by TCP, on one machine over its loopback interface; ports are the kernel's choice. Make it with `join`.

    Where they `share` memory sums go through that, and what is gathered: it takes microseconds, and gloo's threads
    take a millisecond to wake each other up on cores that sleep.
    """

    def __init__(self, rank: int, size: int, gloo: Any) -> None:
        self.rank, self.size = rank, size
        self._gloo: Any = gloo
        self._sums: RankSums | None = None
        self._is_abandoned = False

    def share(self, library: Library, memory_fd: int) -> None:
        """Share the memory with all ranks, or with none. memory_fd: of a file of `RankSums.num_bytes(size)` bytes."""
        memory = torch.frombuffer(mmap.mmap(memory_fd, RankSums.num_bytes(self.size)), dtype=torch.uint8)
        self._sums = RankSums(library, memory, self.rank, self.size, STALL.total_seconds())

    def abandon(self) -> None:
        """A rank is gone: whoever waits for it hears of it, also where gloo does not: a rank that ends before its first
        connection is made would be waited for without end. From any thread."""
        self._is_abandoned = True
        if self._sums is not None:
            self._sums.abandon()

    @classmethod
    def join(cls, rank: int, size: int, place: Place) -> "GlooGroup":
        """Waits until all ranks are here. place: the same for all, see stores.py."""
        torch_gloo: Any = distributed.ProcessGroupGloo  # its type stubs lack what binds it to an address
        options = torch_gloo._Options()
        options._devices = [torch_gloo.create_device(hostname=host_of(place))]
        options._timeout = STALL
        options._threads = 1  # one call at a time
        try:
            return cls(rank, size, torch_gloo(store_at(place), rank, size, options))
        except RuntimeError as e:
            raise PeerLost(f"rank {rank} of {size} could not connect to the others: {_first_line(e)}") from e

    def all_reduce(self, part: Tensor) -> Tensor:
        # Parts in bfloat16 are added in float32 and rounded once.
        wide = part.float().contiguous()
        if self._sums is None:
            self._wait(lambda: self._gloo.allreduce([wide]))
        else:
            with self._collective():
                self._sums.add(wide)
        return wide.to(part.dtype)

    def broadcast(self, tensor: Tensor, *, patient: bool = False) -> None:
        assert tensor.is_contiguous()
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = IDLE if patient else STALL
        self._wait(lambda: self._gloo.broadcast([tensor], options))

    def gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        assert part.shape == shapes[self.rank]
        if self._sums is not None:
            return self._gather_shared(self._sums, part, shapes)
        # Not by gloo's send and receive: where a wait for them exceeds its limit, gloo closes the connection.
        none = [0] * self.size
        num_bytes = [math.prod(shape) * part.element_size() for shape in shapes]
        if self.rank:
            rows = _bytes_of(part.contiguous()).view(-1)
            self.all_to_all(rows, [len(rows), *none[1:]], none)
            return []
        received = self.all_to_all(torch.empty(0, dtype=torch.uint8), none, [0, *num_bytes[1:]])
        others = received.split([0, *num_bytes[1:]])[1:]
        return [part, *(of.view(part.dtype).view(shape) for of, shape in zip(others, shapes[1:], strict=True))]

    def all_to_all(self, rows: Tensor, to_counts: Sequence[int], from_counts: Sequence[int]) -> Tensor:
        assert rows.is_contiguous() and len(rows) == sum(to_counts)
        received = rows.new_empty(sum(from_counts), *rows.shape[1:])
        ends = [_bytes_of(received), _bytes_of(rows)]
        self._wait(lambda: self._gloo.alltoall_base(*ends, [*from_counts], [*to_counts], AllToAllOptions()))
        return received

    def meet(self) -> None:
        self.all_reduce(torch.ones(1))

    def close(self) -> None:
        self._gloo = None  # its connections end with it

    def _gather_shared(self, sums: RankSums, part: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        parts = [torch.empty(shape, dtype=part.dtype) for shape in shapes] if self.rank == 0 else []
        ends = [_bytes_of(of).view(-1) for of in parts]
        most = max(math.prod(shape) for shape in shapes) * part.element_size()
        with self._collective():
            for start, pieces in sums.exchange(_bytes_of(part.contiguous()).view(-1), most):
                for end, piece in zip(ends, pieces, strict=False):  # none elsewhere than at rank 0
                    rest = end[start : start + len(piece)]
                    rest.copy_(piece[: len(rest)])
        return parts

    @contextmanager
    def _collective(self) -> Generator[None]:
        try:
            yield
        except Abandoned as e:
            raise PeerLost(f"rank {self.rank} of {self.size} lost another rank: {e}") from e

    def _wait(self, start: Any) -> None:
        try:
            work = start()
            while not _has_ended(work):
                if self._is_abandoned:
                    raise RuntimeError("it has ended")
        except RuntimeError as e:
            raise PeerLost(f"rank {self.rank} of {self.size} lost another rank: {_first_line(e)}") from e


def _has_ended(work: Any) -> bool:
    """Wait for a call of gloo for a while. Raises RuntimeError where it has failed."""
    try:
        work.wait(POLL)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def _bytes_of(rows: Tensor) -> Tensor:
    """[N, ...] -> [N, bytes of a row] uint8, of the same memory: gloo does not know all dtypes."""
    return rows.view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
