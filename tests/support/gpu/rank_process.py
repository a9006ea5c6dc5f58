"""Process of the second rank of a worker, as far as hand-offs read into it: its KV cache is on a fake GPU, or on a real
one, which both ranks may use.

python -m tests.support.gpu.rank_process LINK KV_LINK LAYOUT NUM_BLOCKS DEVICE
    two descriptors; a message in hexadecimal; a name of torch's, of a fake GPU cpu
"""

import socket
import subprocess
import sys

import pytest
import torch

from diptych.proto import kv_pb2
from diptych.workers.device import kv_cache
from diptych.workers.device.cuda_device import CudaDevice
from diptych.workers.device.device import Device
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.device.joined_memory import Joining
from diptych.workers.device.kv_cache import KVCache
from diptych.workers.device.virtual_memory import VirtualMemory
from diptych.workers.kv.layout import KVLayout
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.pool_pieces import make_link
from diptych.workers.ranks.rank_member import serve_reads

from .fake_libcuda import FakeLibCuda, make_virtual_memory


class TwoRanks:
    """A pool of two ranks, the second of which has a process. memory: as rank 0 sees it."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> None:
        self._link, its = make_link()
        self._kv_link, its_kv = socket.socketpair()
        with its, its_kv:
            flags = [its.fileno(), its_kv.fileno(), layout.to_proto().SerializeToString().hex(), num_blocks, device]
            command = [sys.executable, "-m", __name__, *map(str, flags)]
            self._process = subprocess.Popen(command, pass_fds=(its.fileno(), its_kv.fileno()))
        gpu, virtual = _gpu(device)
        with pytest.MonkeyPatch.context() as patch:
            if device == "cpu":
                patch.setattr(kv_cache, "driver_of", lambda _: virtual)
            self.cache = _cache(layout, num_blocks, 0, Joining(virtual, [self._link]), gpu)
        memory = self.cache.memory
        self.memory = KVMemory(layout, num_blocks, memory.region, memory.device, rank_links=(self._kv_link,))

    def close(self) -> None:
        """The process ends when the other end closes."""
        self._kv_link.close()
        self._link.close()
        assert self._process.wait(20) == 0


def _gpu(device: str) -> tuple[Device, VirtualMemory]:
    if device == "cpu":
        return FakeDevice(), make_virtual_memory(FakeLibCuda())
    return CudaDevice(torch.device(device)), VirtualMemory(torch.device(device).index)


def _cache(layout: KVLayout, num_blocks: int, rank: int, joining: Joining, gpu: Device) -> KVCache:
    return KVCache(layout, num_blocks, gpu.torch_device, rank=rank, shared=joining, gpu=gpu)


def main(link: int, kv_link: int, layout: str, num_blocks: int, device: str) -> None:
    gpu, virtual = _gpu(device)
    joining = Joining(virtual, [socket.socket(fileno=link)])
    of = KVLayout.from_proto(kv_pb2.KVLayout.FromString(bytes.fromhex(layout)))
    serve_reads(socket.socket(fileno=kv_link), _cache(of, num_blocks, 1, joining, gpu), gpu, joining).join()


if __name__ == "__main__":
    flags = sys.argv[1:]
    main(int(flags[0]), int(flags[1]), flags[2], int(flags[3]), flags[4])
