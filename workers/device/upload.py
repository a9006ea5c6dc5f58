"""Weights on their way to a device: out of mapped files, through pinned buffers, into their places.

    host   piece 1 -> buffer 1 | piece 2 -> buffer 2 | piece 3 -> buffer 3 | wait for 1 | piece 4 -> buffer 1 | ...
    lane                         buffer 1 -> place     buffer 2 -> place     buffer 3 -> place ...

The host's part is a copy by all of torch's threads, which share the page faults of a file that is not in memory yet. A
device that copies from the mapping itself meets those one after another (safetensors, issue 729), and to register the
mapping would keep whole files in memory. Numbers of another dtype are converted on the device, where that is free
beside the link. Beyond the weights there are `num_buffers` on the host, and one on the device for what is converted.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..models.checkpoint.weights import Put, put_now
from .device import Device, Event
from .device_errors import needing_memory

BUFFER_BYTES = 32 << 20  # some 0.6 ms of a PCIe 5 link: what an event and a launch cost does not show
NUM_BUFFERS = 3


@dataclass(slots=True)
class _Buffer:
    memory: Tensor  # [bytes] uint8, pinned
    is_free: Event | None = None  # when all copies out of it are done


class Upload:
    """Use as a context manager: once it is left, all that was put is there. `put` is a Put of weights.py."""

    def __init__(self, device: Device, buffer_bytes: int = BUFFER_BYTES, num_buffers: int = NUM_BUFFERS) -> None:
        """buffer_bytes: a multiple of 8."""
        assert buffer_bytes % 8 == 0 and num_buffers > 0
        self._device = device
        self._lane = device.lane("upload")
        self._buffers = [_Buffer(device.pinned((buffer_bytes,), torch.uint8)) for _ in range(num_buffers)]
        self._next = 0
        self._arrived: Tensor | None = None  # [bytes] uint8 on the device: input of conversions there

    def __enter__(self) -> "Upload":
        self._device.synchronize()  # no pending operation uses memory that targets are given
        return self

    def __exit__(self, *_: object) -> None:
        self._lane.record().wait()

    def put(self, target: Tensor, stored: Tensor, copied: Callable[[int], object]) -> None:
        """Copy `stored` (host memory that may go when this returns) to `target` (on the device, of the same shape,
        contiguous), as `target`'s dtype. `copied` is told of bytes that have left `stored`."""
        assert target.shape == stored.shape and target.is_contiguous()
        for place, piece in _pieces(target, stored, len(self._buffers[0].memory) // stored.element_size()):
            buffer = self._buffers[self._next]
            self._next = (self._next + 1) % len(self._buffers)
            if buffer.is_free is not None:
                buffer.is_free.wait()
            staged = _as_bytes(buffer.memory, piece)
            staged.copy_(piece)
            self._lane.run(partial(self._place, place, staged))
            buffer.is_free = self._lane.record()
            copied(piece.nbytes)

    def _place(self, place: Tensor, staged: Tensor) -> None:
        """Copy a staged tensor to its place, on the lane. With equal dtypes it is one copy; torch would convert on the
        host."""
        if place.dtype == staged.dtype:
            place.copy_(staged, non_blocking=True)
            return
        if self._arrived is None:
            self._arrived = torch.empty(len(self._buffers[0].memory), dtype=torch.uint8, device=place.device)
        arrived = _as_bytes(self._arrived, staged)
        arrived.copy_(staged, non_blocking=True)
        place.copy_(arrived)


def _as_bytes(memory: Tensor, like: Tensor) -> Tensor:
    """The beginning of `memory` ([bytes] uint8), with `like`'s dtype and shape."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def _pieces(target: Tensor, stored: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Both cut alike: contiguous pieces of `target` of `most` numbers at most."""
    if stored.is_contiguous():
        target, stored = target.view(-1), stored.view(-1)
    if stored.numel() <= most:
        yield target, stored
    elif rows := most // stored[0].numel():
        yield from zip(target.split(rows), stored.split(rows), strict=True)
    else:
        for row, stored_row in zip(target, stored, strict=True):
            yield from _pieces(row, stored_row, most)


@contextmanager
def put_on(gpu: Device | None, *, at_once: bool) -> Generator[Put]:
    """Yield a function that puts weights on the device; all are there on leaving. at_once: each is there when the
    function returns, for what computes with weights meanwhile, and gives memory back that uploads would overwrite."""
    remedy = "end what else uses it, serve a smaller model, or use a GPU with more"
    with needing_memory("the model's weights", remedy):
        if gpu is None or at_once:
            yield put_now
        else:
            with Upload(gpu) as upload:
                yield upload.put
