"""A rank other than 0, as a member of its worker: its groups, its part of the KV memory, and rank 0's step messages.

    join (made) -> num_blocks -> shared -> [begin_draft] -> meet -> messages, until the process ends

rank_processes.py is rank 0's side.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from ...kernels.cpu.load import library
from ..device.device import Device
from ..device.joined_memory import Joining
from ..device.kv_cache import KVCache, available_bytes
from ..device.virtual_memory import virtual_memory_of
from ..handoff.machine_server import serve_machine_kv
from ..handoff.rank_receiver import RankReceiver
from ..models.layers.step import Int32s, receive_message
from ..models.plan.rank_settings import RankSettings
from ..parallel.groups import GlooGroup, Group
from ..parallel.stores import DEVICES, place_beside, place_named
from ..transport.rank_server import serve_rank

CHECK_S = 1.0


class RankMember:
    def __init__(
        self, settings: RankSettings, links: Sequence[socket.socket], gpu: Device | None, step_bytes: int
    ) -> None:
        """Join the other ranks, once all have read their weights. links: to the machine's first rank, or from it to
        the machine's others. gpu: this rank's; None: it computes on the host. step_bytes: of its memory, that steps
        need. Raises RankLost."""
        self._settings, self._links, self._gpu = settings, links, gpu
        place = place_named(settings.rendezvous, settings.own_host)
        self._control_group = GlooGroup.join(settings.rank, settings.size, place)
        self.group: Group = self._control_group  # the group of the step's sums
        if settings.sums_fd is not None:
            compiled = library()
            assert compiled is not None  # rank 0 has it
            self._control_group.share(compiled, settings.sums_fd)
        if gpu is not None:
            self.group = gpu.group(settings.rank, settings.size, place_beside(place, DEVICES))
            self._say_free(available_bytes(gpu.torch_device) - step_bytes)
        elif settings.num_machines > 1:
            self._say_free(available_bytes(torch.device("cpu")) // len(settings.machine_ranks) - step_bytes)

    def _say_free(self, num_bytes: int) -> None:
        self._control_group.gather(torch.tensor([max(num_bytes, 0)]), [(1,)] * self._settings.size)

    def num_blocks(self) -> int:
        """Receive the number of KV blocks."""
        [num_blocks] = receive_message(self._control_group).tolist()
        return num_blocks

    def shared(self) -> int | Joining:
        """See RankProcesses.shared."""
        memory = virtual_memory_of(self._gpu) if self._gpu is not None else None
        return self._settings.memory_fd if memory is None else Joining(memory, self._links)

    def serve_reads(self, cache: KVCache, shared: int | Joining) -> None:
        """Take part in rank 0's hand-offs where this rank's piece of the pool is on its own device. shared: what the
        cache was made of."""
        if self._settings.kv_link_fd >= 0 and self._gpu is not None:
            serve_reads(socket.socket(fileno=self._settings.kv_link_fd), cache, self._gpu, shared)

    def serve_machine_kv(self, cache: KVCache) -> None:
        """Start a thread on which rank 0's hand-offs use this machine's KV, where this is the machine's first rank."""
        if self._settings.machine_kv_fd < 0:
            return
        link = socket.socket(fileno=self._settings.machine_kv_fd)
        serving = link, cache.memory, cache.copy_blocks
        threading.Thread(target=serve_machine_kv, args=serving, name="diptych-machine-kv", daemon=True).start()

    def begin_draft(self) -> None:
        """Wait, without a deadline, until rank 0 has loaded what drafts: then all make it ready together. A checkpoint
        may take as long as its disk does, and this process ends with rank 0's."""
        receive_message(self._control_group)

    def meet(self) -> None:
        """Wait until all ranks are ready for steps; for rank 0, which may load what drafts, without a deadline. Tell
        the GPU that all is loaded."""
        receive_message(self._control_group)
        self._control_group.meet()
        if self._gpu is not None:
            self._gpu.loaded()

    def messages(self) -> Iterator[Int32s]:
        """Step messages of rank 0, without end. Raises RankLost, or the error of a GPU that is lost."""
        return self._received() if self._gpu is None else self._received_ahead(self._gpu)

    def _received(self) -> Iterator[Int32s]:
        while True:
            yield receive_message(self._control_group)

    def _received_ahead(self, gpu: Device) -> Iterator[Int32s]:
        """Receive on a thread of its own: rank 0 broadcasts a step before the previous one is computed, and does not
        wait. While no message comes, check `gpu`, for other ranks may wait for it."""
        received: SimpleQueue[Int32s | Exception] = SimpleQueue()

        def listen() -> None:
            try:
                for each in self._received():
                    received.put(each)
            except Exception as e:  # noqa: BLE001 - raised by the consumer
                received.put(e)

        threading.Thread(target=listen, name="diptych-messages", daemon=True).start()
        while True:
            try:
                each = received.get(timeout=CHECK_S)
            except Empty:
                gpu.check()
                continue
            if isinstance(each, Exception):
                raise each
            yield each


def serve_reads(link: socket.socket, cache: KVCache, gpu: Device, shared: int | Joining) -> threading.Thread:
    """Start a thread on which rank 0's hand-offs read into this rank's piece of the pool, and convert into those of all
    ranks, until rank 0's end of `link` closes. Raises RankLost."""
    driver, num_ranks, piece = None, cache.layout.tensor_parallel, cache.piece
    whole: Callable[[], Tensor | None] = lambda: None  # noqa: E731 - this process sees all pieces already
    if isinstance(shared, Joining):
        driver, whole = shared.memory, partial(shared.whole, shared.all_pieces(num_ranks, piece.num_bytes))

    def make_receiver() -> RankReceiver:
        return RankReceiver(cache.memory_of_all(gpu, whole()))

    serving = link, piece, driver, make_receiver
    thread = threading.Thread(target=serve_rank, args=serving, name="diptych-rank-agent", daemon=True)
    thread.start()
    return thread
