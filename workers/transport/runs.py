"""A segment's bytes in one worker's memory, as runs (offset, length) in the order in which they travel. No I/O."""

from collections.abc import Iterator, Sequence

from ..kv_layout import KVMemory

Run = tuple[int, int]  # offset from the memory's start, length; bytes


def runs_of(memory: KVMemory, blocks: Sequence[int], first_layer: int, num_layers: int) -> list[Run]:
    """Runs of these layers of these blocks; those that touch are one."""
    runs: list[Run] = []
    for block in blocks:
        assert 0 <= block < memory.num_blocks
        offset, length = memory.run(block, first_layer, num_layers)
        if runs and sum(runs[-1]) == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((offset, length))
    return runs


def gather(view: memoryview, runs: Sequence[Run], chunk_bytes: int) -> Iterator[bytes]:
    """Copy the runs out, in pieces of `chunk_bytes` (the last may be shorter). Each piece is copied when asked for."""
    piece = bytearray()
    for start, length in runs:
        at, end = start, start + length
        while at < end:
            step = min(end - at, chunk_bytes - len(piece))
            if step == chunk_bytes:
                yield bytes(view[at : at + step])  # the common case, copied once
            else:
                piece += view[at : at + step]
                if len(piece) == chunk_bytes:
                    yield bytes(piece)
                    piece.clear()
            at += step
    if piece:
        yield bytes(piece)


class Scatter:
    """Writes a stream of bytes into runs, in order."""

    def __init__(self, view: memoryview, runs: Sequence[Run]) -> None:
        self._view = view
        self._runs = list(reversed(runs))
        self.num_missing = sum(length for _, length in runs)

    def write(self, data: bytes) -> None:
        """Raises ValueError, and writes nothing, when there is more data than room."""
        if len(data) > self.num_missing:
            raise ValueError(f"{len(data)} bytes for {self.num_missing}")
        self.num_missing -= len(data)
        rest = memoryview(data)
        while rest:
            offset, length = self._runs.pop()
            step = min(length, len(rest))
            self._view[offset : offset + step] = rest[:step]
            if step < length:
                self._runs.append((offset + step, length - step))
            rest = rest[step:]
