"""Sums over a worker's GPUs in memory that each of them maps of all others (torch.distributed._symmetric_memory), in
place of NCCL's. They have not run on a GPU (kernels/common/untried.py).

    part ── copied into this rank's buffer ── a kernel that waits for the other ranks', and reads their buffers ──> sum

Every rank gets the same bits: each number is added up by one rank alone, or by all in the order of the ranks. A graph
may hold these sums: the buffer stays where it is. A kernel that waits for a rank that is gone waits without end:
nothing but the end of its process ends it (device_group.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from ...kernels.common.lang import launched
from ...kernels.common.untried import VARIABLE, is_wanted

BUFFER_BYTES = 8 << 20  # of each rank; NCCL adds up larger messages
ALIGNED_BYTES = 16  # what a thread reads at once
DTYPES = (torch.bfloat16, torch.float32)
UNROLLED = (2, 4, 8)  # numbers of ranks for which two-shot sums have an output of their own
SUM = "sum"

c10d: Any = _distributed_c10d
ops: Any = torch.ops.symm_mem


@dataclass(frozen=True, slots=True)
class SumMethod:
    """One of torch's operations."""

    name: str
    op: str  # of torch.ops.symm_mem
    has_out: bool  # else the sum replaces the part in the buffer


# Each rank reads all parts, and adds them up in the order of the ranks. Not one_shot_all_reduce_copy_out, which copies
# the part itself: its first warp says that this is done without waiting for the others.
ONE_SHOT = SumMethod("one-shot sums", "one_shot_all_reduce_out", True)
# Each rank adds up a piece, in that order, and all read it there; or it writes its piece to all.
TWO_SHOT = SumMethod("two-shot sums", "two_shot_all_reduce_out", True)
TWO_SHOT_IN_PLACE = SumMethod("two-shot sums", "two_shot_all_reduce_", False)
# Each rank has the switch add up a piece, and write it to all.
MULTICAST = SumMethod("sums in the switch", "multimem_all_reduce_", False)


class SymmetricSums:
    """Make it with `meet`. `chosen`: who adds up messages, with the number of bytes up to which each does, ascending;
    None, and beyond: NCCL. The same on all ranks."""

    def __init__(self, group: Any, name: str, buffer: Tensor, *, has_multicast: bool) -> None:
        """group: torch's, of this name. buffer: [bytes] uint8."""
        self.chosen: Sequence[tuple[int, SumMethod | None]] = ()
        self.dtype: torch.dtype | None = None  # of the messages for which it was chosen
        self._group, self._name, self._buffer = group, name, buffer  # torch does not keep the group
        two_shot = TWO_SHOT if group.size() in UNROLLED else TWO_SHOT_IN_PLACE
        self.methods = (ONE_SHOT, two_shot, MULTICAST) if has_multicast else (ONE_SHOT, two_shot)

    @classmethod
    def meet(cls, name: str, rank: int, size: int, store: Any, device: torch.device) -> "SymmetricSums":
        """Wait until all ranks are here. name: of no other group of this process. Raises RuntimeError where memory
        cannot be mapped, and AttributeError where torch lacks these functions."""
        group = c10d.ProcessGroup(store, rank, size)
        c10d._register_process_group(name, group)
        # Memory of its own: in a pool's, as `_symmetric_memory.empty` makes it, it may begin anywhere.
        memory: Any = c10d._SymmetricMemory
        buffer = memory.empty_strided_p2p((BUFFER_BYTES,), (1,), torch.uint8, device, name)
        handle = memory.rendezvous(buffer, name)
        return cls(group, name, buffer, has_multicast=handle.multicast_ptr != 0)

    def takes(self, part: Tensor) -> bool:
        """Return whether all methods know such a part, of any strides."""
        num_bytes = part.numel() * part.element_size()
        return part.dtype in DTYPES and 0 < num_bytes <= BUFFER_BYTES and num_bytes % ALIGNED_BYTES == 0

    def add(self, method: SumMethod, part: Tensor) -> Tensor:
        """part: the same shape on every rank, which this takes. Returns the sum: a new tensor."""
        own = self._buffer[: part.numel() * part.element_size()].view(part.dtype).view(part.shape)
        own.copy_(part)
        add = getattr(ops, method.op)
        if not method.has_out:
            launched(add, own, SUM, self._name)
            return own.clone()
        out = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        launched(add, own, SUM, self._name, out)
        return out

    def all_reduce(self, part: Tensor) -> Tensor | None:
        """part: the same shape on every rank. Returns the sum, a new tensor; None where NCCL is to add it up."""
        if part.dtype != self.dtype or not self.takes(part):
            return None
        num_bytes = part.numel() * part.element_size()
        method = next((of for last, of in self.chosen if num_bytes <= last), None)
        return None if method is None else self.add(method, part)


def why_not_symmetric(rank: int, size: int, device: torch.device) -> str:
    """Say why the ranks of this machine cannot have such memory, as far as this one knows; "" where nothing is known.
    device: rank 0's comes first, then the others' in their order."""
    if not is_wanted("symmetric-sums"):
        return f"they have not run on a GPU, and {VARIABLE} does not name them"
    if torch.version.hip is not None:
        return "it has not been tried on GPUs of AMD"
    first = (device.index or 0) - rank
    for other in range(first, first + size):
        if other != first + rank and not torch.cuda.can_device_access_peer(first + rank, other):
            return f"GPU {first + rank} cannot read the memory of GPU {other} (no NVLink, nor PCIe between peers)"
    return ""
