"""Counts what the host does for a step of the CUDA engine, on a machine without a GPU: it measures no time.

    python -m benchmarks.gpu.host_path [--model 8b] [--batch 1 64 256]

The engine runs on a device whose tensors have no numbers (tests/support/gpu/described_device.py), where whatever would
make the host wait is refused. Counted are the operations of torch and the launches of kernels that the host queues one
by one, copies to and from the device, and memory that is asked for, pinned or the device's; replays of graphs are one
each. "At a boundary": each sequence has begun a new block, so that block tables are sent.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from tests.support.gpu.described_device import DescribedDevice, launching, prepare

prepare()

import torch  # noqa: E402 (kernels find triton: see kernels/common/lang.py)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from .gpu_engine import measure, rig  # noqa: E402
from .gpu_engine.models import SHAPES, TINY  # noqa: E402
from .gpu_engine.timed import HostClock, TimedDevice  # noqa: E402

_NEW = ("empty", "new_empty", "empty_strided", "zeros", "_to_copy", "index_select", "ones", "full", "arange", "cat")
CONTEXT = 1024 + 8


class Counted(DescribedDevice):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def pinned(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        self.counts["pinned allocations"] += 1
        return super().pinned(shape, dtype)

    def capture(self, lane: Any, work: Any) -> Callable[[], None]:
        super().capture(lane, work)

        def replay() -> None:
            self.counts["graphs"] += 1

        return replay


class Operations(TorchDispatchMode):
    """Counter of what torch is asked for on the device."""

    def __init__(self, device: Counted) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, counts = kwargs or {}, self._device.counts
        with self:
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        result = func(*args, **kwargs)
        if self._device.depth and not func.is_view:
            name, is_there = func.overloadpacket.__name__, isinstance(result, torch.Tensor) and not result.is_cpu
            is_copy = name in ("copy_", "_to_copy") and any(isinstance(of, torch.Tensor) and of.is_cpu for of in args)
            counts["copies between host and device"] += is_copy
            counts["other operations of torch"] += not is_copy and not name.startswith(("empty", "new_empty"))
            counts["device allocations"] += is_there and name in _NEW and "out" not in kwargs
        return result


class NoGenerator:
    def __init__(self, device: torch.device) -> None: ...

    def manual_seed(self, seed: int) -> None: ...


def steps_of(model: str, batches: list[int]) -> None:
    device = Counted()
    launching(device)
    spec = TINY if model == "tiny" else SHAPES[model]
    settings = rig.Settings(kv_memory_bytes=1 << 36)
    without_numbers = patch.object(torch.Tensor, "normal_", lambda tensor, *_, **__: tensor)
    with device.described():
        with without_numbers, patch.object(torch, "Generator", NoGenerator):
            made = rig.make_rig(spec, settings, TimedDevice(device, HostClock()))
        device.loaded()
        for batch in batches:
            keys = measure.arrive(made, measure.DecodeCase(batch, CONTEXT), 64)
            found: dict[str, Counter[str]] = {}
            with Operations(device):
                for _ in range(24):
                    device.counts.clear()
                    before = sum(device.launches.values())
                    sequence = next(iter(made.engine.scheduler._running))
                    is_new = len(sequence.token_ids) % settings.block_size == 0
                    made.engine.step()
                    device.counts["launches of kernels"] = sum(device.launches.values()) - before
                    found["at a boundary" if is_new else "else"] = Counter(device.counts)
            for when, counts in sorted(found.items()):
                told = ", ".join(f"{name} {num}" for name, num in sorted(counts.items()) if num)
                print(f"{model}, batch {batch}, {when}: {told}")
            measure.leave(made.engine, keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, "tiny"], default="8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    options = parser.parse_args()
    steps_of(options.model, options.batch)


if __name__ == "__main__":
    main()
