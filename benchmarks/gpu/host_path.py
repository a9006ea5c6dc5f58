"""Counts what the host does for a step of the CUDA engine, on a machine without a GPU, and times what it does itself.

    python -m benchmarks.gpu.host_path [--model 8b] [--batch 1 64 256]

The engine runs on a device whose tensors have no numbers (tests/support/gpu/described_device.py), where whatever would
make the host wait is refused. Counted are the operations of torch and the launches of kernels that the host queues one
by one, copies to and from the device, and memory that is asked for, pinned or the device's; replays of graphs are one
each. "At a boundary": each sequence has begun a new block, so that block tables are sent.

"With arrivals" sequences have 1 to 64 output tokens, and for each that ends a prompt of a block comes: 8 a step of 256
rows. Steps are counted that were launched while none was under way (a GPU would idle before them). Timed, in processor
time of the host: the scheduler, and the preparation of a step's inputs (GpuSteps._plan), by row; medians of all steps.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import patch

from tests.support.gpu.described_device import DescribedDevice, launching, prepare

prepare()

import torch  # noqa: E402 (kernels find triton: see kernels/common/lang.py)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from diptych.workers.common.request import Request, SamplingParams  # noqa: E402
from diptych.workers.execution.gpu.gpu_steps import GpuSteps  # noqa: E402

from .gpu_engine import measure, rig  # noqa: E402
from .gpu_engine.models import SHAPES, TINY  # noqa: E402
from .gpu_engine.timed import HostClock, TimedDevice  # noqa: E402

_NEW = ("empty", "new_empty", "empty_strided", "zeros", "_to_copy", "index_select", "ones", "full", "arange", "cat")
CONTEXT = 1024 + 8
NUM_STEPS = 24
NUM_NEW = 64  # at most, output tokens of a sequence that arrives


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


class Timed:
    """Seconds of this thread's processor time that calls of a function have taken, each."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.seconds: list[float] = []

    def __call__(self, *args: Any) -> Any:
        began = time.thread_time()
        try:
            return self._call(*args)
        finally:
            self.seconds.append(time.thread_time() - began)


def time_steps(made: rig.Rig, step: Callable[[], object], num_rows: int, what: str) -> None:
    """Time the scheduler and the preparation of inputs in some steps, and count the steps before which a GPU idles."""
    scheduler, backend = made.engine.scheduler, made.runner.backend
    assert isinstance(backend, GpuSteps)
    ahead, anew, plan = Timed(scheduler.schedule_ahead), Timed(scheduler.schedule), Timed(backend._plan)
    with (
        patch.object(scheduler, "schedule_ahead", ahead),
        patch.object(scheduler, "schedule", anew),
        patch.object(backend, "_plan", plan),
    ):
        for _ in range(2 * NUM_STEPS):
            step()
    by_row = [1e6 * statistics.median(of.seconds) / num_rows for of in (ahead, plan)]
    told = f"scheduler {by_row[0]:.2f} us a row, inputs {by_row[1]:.2f} us a row"
    print(f"{what}: {told}; {len(anew.seconds)} of {2 * NUM_STEPS} steps launched while none was under way")


def step_with_arrivals(made: rig.Rig, num_rows: int) -> Callable[[], object]:
    """Make a function that steps once, before which as many requests come as have ended."""
    engine, numbers = made.engine, count()

    def step() -> None:
        while engine.scheduler.num_running + engine.scheduler.num_waiting < num_rows:
            number = next(numbers)
            sampling = SamplingParams(temperature=0.0, max_tokens=1 + number % NUM_NEW, ignore_eos=True)
            prompt = tuple((number + i) % made.spec.vocab_size for i in range(made.settings.block_size))
            engine.submit(f"a/{number}", Request(f"a/{number}", prompt, sampling, measure.TIMEOUT_S), [])
        engine.step()

    return step


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
            keys = measure.arrive(made, measure.DecodeCase(batch, CONTEXT), 4 * NUM_STEPS)
            found: dict[str, Counter[str]] = {}
            with Operations(device):
                for _ in range(NUM_STEPS):
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
            time_steps(made, made.engine.step, batch, f"{model}, batch {batch}")
            measure.leave(made.engine, keys)
            step = step_with_arrivals(made, batch)
            for _ in range(NUM_STEPS):
                step()
            time_steps(made, step, batch, f"{model}, batch {batch}, with arrivals")
            measure.leave(made.engine, list(made.engine._sequences))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, "tiny"], default="8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    options = parser.parse_args()
    steps_of(options.model, options.batch)


if __name__ == "__main__":
    main()
