"""Token counts of each expert, as the host knows them: copied now and then, without waiting for the copy."""

from contextlib import suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .device import Device, Event, Lane


class ExpertTokens:
    def __init__(self, device: Device, lane: Lane, counts: Tensor) -> None:
        """counts: [layers, experts] int64 on the device, which steps add to on the lane."""
        self._lane, self._counts = lane, counts
        self._arriving = device.pinned(counts.shape, counts.dtype)
        self._arrived: Event | None = None
        self._known: NDArray[np.int64] = self._arriving.numpy().copy()

    def latest(self) -> NDArray[np.int64]:
        """Return the newest counts that have arrived, and ask for a copy once the steps launched by now are over, for a
        later call."""
        with suppress(RuntimeError):  # of a lost device: a step reports it by name, or Runner.check does
            if self._arrived is None or self._arrived.has_happened:
                if self._arrived is not None:
                    self._known = self._arriving.numpy().copy()
                self._lane.run(partial(self._arriving.copy_, self._counts, non_blocking=True))
                self._arrived = self._lane.record()
        return self._known
