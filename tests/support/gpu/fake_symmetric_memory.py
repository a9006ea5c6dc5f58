"""Symmetric memory of torch without GPUs: signatures and checks of its functions as released (2.11 to 2.13), whose sums
go over gloo. A sum waits without end for a rank that is gone.

python -m tests.support.gpu.fake_symmetric_memory SETTINGS
    is a rank of a worker on fake devices (execution/rank.py) that has it
python -m tests.support.gpu.fake_symmetric_memory lose-a-rank MODEL
    is such a worker, whose other rank is killed before a step
"""

import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, distributed
from torch._C import _distributed_c10d as released

from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.device import device_group
from diptych.workers.device.device_group import FakeGroup, meet_in_memory
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution import rank as rank_module
from diptych.workers.execution.common import sum_choice
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.parallel import symmetric_sums
from diptych.workers.parallel.groups import GlooGroup
from diptych.workers.parallel.stores import Place
from diptych.workers.ranks import local_ranks

MODULE = __spec__.name  # also where it is __main__
c10d: Any = released
MOST_ALIGNED = 16
MULTICAST = 1 << 40  # an address


class FakeHandle:
    """A _SymmetricMemory, of what rendezvous gives."""

    def __init__(self, group: Any, multicast_ptr: int) -> None:
        self.rank, self.world_size, self.multicast_ptr = group.rank(), group.size(), multicast_ptr
        self._size = group.size()
        store = distributed.PrefixStore("fake-symmetric", group.get_group_store())  # type: ignore[attr-defined]
        torch_gloo: Any = distributed.ProcessGroupGloo
        options = torch_gloo._Options()
        options._devices = [torch_gloo.create_device(hostname="127.0.0.1")]
        self._gloo: Any = torch_gloo(store, self.rank, self.world_size, options)

    def parts(self, of: Tensor) -> list[Tensor]:
        """Gather those of all ranks."""
        mine = of.reshape(-1).view(torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self._size)]
        self._gloo.allgather([found], [mine]).wait()
        return [each.view(of.dtype).view(of.shape) for each in found]


class FakeMemory:
    """`_SymmetricMemory` and `torch.ops.symm_mem` of a process. has_multicast: of its GPUs. calls: operation and bytes
    of each sum. is_stuck: set while a sum waits for a rank that is gone."""

    def __init__(self, *, has_multicast: bool = True) -> None:
        self._multicast_ptr = MULTICAST if has_multicast else 0
        self._buffers = dict[int, int]()  # address and bytes
        self._handles = dict[tuple[int, str], FakeHandle]()
        self.calls: list[tuple[str, int]] = []
        self.is_stuck = threading.Event()

    def empty_strided_p2p(
        self,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        group_name: str | None = None,
        alloc_id: int | None = None,
    ) -> Tensor:
        assert alloc_id is None
        made = torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(255)
        self._buffers[made.untyped_storage().data_ptr()] = made.untyped_storage().nbytes()
        return made

    def rendezvous(self, tensor: Tensor, group_name: str | None = None) -> FakeHandle:
        """Meet all ranks; a later call, as operations do it, too, returns what the first gave."""
        assert group_name is not None
        address = tensor.untyped_storage().data_ptr()
        if address not in self._buffers:
            raise RuntimeError("input must be allocated with empty_strided_p2p().")
        if (address, group_name) not in self._handles:
            group = c10d._resolve_process_group(group_name)
            self._handles[address, group_name] = FakeHandle(group, self._multicast_ptr)
        return self._handles[address, group_name]

    def one_shot_all_reduce_out(self, input: Tensor, reduce_op: str, group_name: str, out: Tensor) -> Tensor:
        return out.copy_(self._sum("one_shot_all_reduce_out", input, reduce_op, group_name, out))

    def two_shot_all_reduce_out(self, input: Tensor, reduce_op: str, group_name: str, output: Tensor) -> Tensor:
        handle = self.rendezvous(input, group_name)
        if handle.world_size not in {2, 4, 8}:
            raise RuntimeError(f"Not implemented for world_size={handle.world_size}")
        found = self._sum("two_shot_all_reduce_out", input, reduce_op, group_name, output)
        input.fill_(torch.nan)  # sums of pieces
        return output.copy_(found)

    def two_shot_all_reduce_(self, input: Tensor, reduce_op: str, group_name: str) -> Tensor:
        return input.copy_(self._sum("two_shot_all_reduce_", input, reduce_op, group_name))

    def multimem_all_reduce_(self, input: Tensor, reduce_op: str, group_name: str) -> Tensor:
        if self.rendezvous(input, group_name).multicast_ptr == 0:
            raise RuntimeError("multimem_all_reduce_: multicast support is required.")
        return input.copy_(self._sum("multimem_all_reduce_", input, reduce_op, group_name))

    def _sum(self, op: str, input: Tensor, reduce_op: str, group_name: str, out: Tensor | None = None) -> Tensor:
        """Add up in the order of the ranks, rounded after each addition unless the switch adds."""
        for of in (input, *(() if out is None else (out,))):
            assert of.is_contiguous() and of.shape == input.shape and of.dtype == input.dtype
        assert reduce_op == "sum" and input.dtype in {torch.bfloat16, torch.float32}
        least, num_bytes = max(4, input.element_size()), input.numel() * input.element_size()
        assert input.storage_offset() * input.element_size() % least == 0 == num_bytes % least
        self.calls.append((op, num_bytes))
        handle = self.rendezvous(input, group_name)
        try:
            first, *others = handle.parts(input)
        except RuntimeError:  # of gloo, which hears of it
            self.is_stuck.set()
            while True:
                time.sleep(3600.0)
        total = first.float() if op == "multimem_all_reduce_" else first
        for other in others:
            total = total + other
        return total.to(input.dtype)


class MemoryGroup(FakeGroup):
    """A FakeGroup whose ranks have symmetric memory."""

    def __init__(self, gloo: GlooGroup, place: Place, why_not: str = "") -> None:
        super().__init__(gloo)
        self.sums = meet_in_memory(self, place, torch.device("cpu"), why_not)

    def abandon(self) -> None:
        """Watch the "device", as groups of GPUs do."""
        super().abandon()
        is_stuck = symmetric_sums.ops.is_stuck

        def synchronize() -> None:
            while is_stuck.is_set():
                time.sleep(3600.0)

        threading.Thread(target=device_group.end_if_stuck, args=(synchronize,), daemon=True).start()


def install(patch: pytest.MonkeyPatch, memory: FakeMemory) -> None:
    names = {name: getattr(c10d, name) for name in ("ProcessGroup", "_register_process_group")}
    patch.setattr(symmetric_sums, "c10d", SimpleNamespace(_SymmetricMemory=memory, **names))
    patch.setattr(symmetric_sums, "ops", memory)


@contextmanager
def ranks_with_memory() -> Generator[FakeMemory]:
    """Give workers on fake devices symmetric memory: this process's, and the processes of their other ranks."""

    def start(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        python, flag, module, *settings = command
        assert flag == "-m" and module.endswith(".workers.execution.rank")
        return subprocess.Popen([python, flag, MODULE, *settings], **options)

    memory = FakeMemory()
    with pytest.MonkeyPatch.context() as patch:
        _give(patch, memory)
        patch.setattr(local_ranks, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
        yield memory


def _give(patch: pytest.MonkeyPatch, memory: FakeMemory) -> None:
    def group(_: FakeDevice, rank: int, size: int, place: Place) -> FakeGroup:
        return MemoryGroup(GlooGroup.join(rank, size, place), place)

    install(patch, memory)
    patch.setattr(sum_choice, "NUM_CALLS", 2)  # each waits for the other processes
    patch.setattr(FakeDevice, "group", group)


def _lose_a_rank(model: str) -> None:
    """Does not return."""
    device_group.END_S = 0.5
    with ranks_with_memory() as memory:
        config = WorkerConfig.of(
            Path(model), device="fake", tensor_parallel=2, cuda_graphs=False, kv_memory_bytes=4 << 20
        )
        runner = ModelRunner.load(config)
        sums = runner.backend._own.group.sums  # type: ignore[attr-defined]
        sums.chosen = [(symmetric_sums.BUFFER_BYTES, symmetric_sums.ONE_SHOT)]
        [rank] = [child for child in psutil.Process().children() if MODULE in child.cmdline()]
        threading.Thread(target=lambda: memory.is_stuck.wait() and print("a kernel waits", flush=True)).start()
        rank.kill()
        sums.add(symmetric_sums.ONE_SHOT, torch.ones(4))


if __name__ == "__main__":
    if sys.argv[1] == "lose-a-rank":
        _lose_a_rank(sys.argv[2])
    _give(pytest.MonkeyPatch(), FakeMemory())
    rank_module.main(sys.argv)
