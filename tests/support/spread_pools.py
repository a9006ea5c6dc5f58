"""A KV pool whose ranks are on several "machines" of this process: a thread serves each but the first."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from diptych.workers.handoff.machine_link import MachineLink
from diptych.workers.handoff.machine_server import serve_machine_kv
from diptych.workers.handoff.spread_kv import SpreadKV
from diptych.workers.kv.layout import KVLayout
from diptych.workers.kv.memory import KVMemory

from .gpu.fake_cuda import make_device_memory, seen_by_host
from .handoff_pair import make_memory

STAGING_BYTES = 1 << 22
Pairs = list[tuple[int, int]]


@dataclass
class SpreadPool:
    parts: Sequence[KVMemory]  # of each machine
    kv: SpreadKV
    links: Sequence[MachineLink]
    copied: Sequence[Pairs]  # by each machine but the first

    @property
    def content(self) -> bytes:
        return b"".join(bytes(of.region.view or b"") for of in map(_seen, self.parts))

    @content.setter
    def content(self, data: bytes) -> None:
        for of in map(_seen, self.parts):
            assert of.region.view is not None
            of.region.view[:], data = data[: len(of.region.view)], data[len(of.region.view) :]

    @property
    def whole(self) -> KVMemory:
        """A copy that is not divided, in host memory."""
        return make_memory(self.kv.memory.layout, self.kv.memory.num_blocks, content=self.content)


@contextmanager
def spread(
    layout: KVLayout, num_blocks: int, cut: Sequence[int], *, on_device: bool = False, over_tcp: bool = False
) -> Iterator[SpreadPool]:
    """cut: numbers of ranks, by machine."""
    ranks = [range(*ends) for ends in pairwise((0, *accumulate(cut)))]
    parts = [(make_device_memory if on_device else make_memory)(layout, num_blocks, ranks=of) for of in ranks]
    pairs = [_tcp_pair() if over_tcp else socket.socketpair() for _ in parts[1:]]
    copied: list[Pairs] = [[] for _ in pairs]
    threads = [
        threading.Thread(target=serve_machine_kv, args=(there, part, noted.extend))
        for (_, there), part, noted in zip(pairs, parts[1:], copied, strict=True)
    ]
    for thread in threads:
        thread.start()
    links = [MachineLink(here, of) for (here, _), of in zip(pairs, ranks[1:], strict=True)]
    kv = SpreadKV(parts[0], links, STAGING_BYTES)
    try:
        yield SpreadPool(parts, kv, links, copied)
    finally:
        kv.close()
        for thread in threads:
            thread.join()


def _seen(part: KVMemory) -> KVMemory:
    return part if part.device is None else replace(seen_by_host(part), device=None)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    return here, there
