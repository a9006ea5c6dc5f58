"""Kernels of a few steps by torch.profiler: how often each ran, and how long, by the device's clock if it has one."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ..report.rows import put
from .measure import DecodeCase, PromptCase, arrive, fits, leave, submit_prompts
from .rig import Rig

MOST_ROWS = 20
NUM_STEPS = 4


def profile_decode(rig: Rig, case: DecodeCase) -> None:
    """Put a row for each kernel of decode steps; none where the KV does not fit."""
    if not fits(rig, case.batch, case.context + 4 * NUM_STEPS):
        return
    keys = arrive(rig, case, 4 * NUM_STEPS)
    for _ in range(NUM_STEPS):
        rig.engine.step()
    _profile(rig, f"decode, {case}", NUM_STEPS, lambda: [rig.engine.step() for _ in range(NUM_STEPS)])
    leave(rig.engine, keys)


def profile_prompts(rig: Rig, case: PromptCase) -> None:
    """Put a row for each kernel from a prompt's first step to its last."""
    if not fits(rig, case.num_prompts, case.num_tokens + 1):
        return

    def run() -> None:
        submit_prompts(rig, case, seed=11)
        num_first = 0
        while num_first < case.num_prompts:
            num_first += len(rig.engine.step().tokens)

    _profile(rig, f"prefill, {case}", 1, run)


def _profile(rig: Rig, what: str, num_steps: int, run: Callable[[], object]) -> None:
    is_cuda = rig.device.torch_device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with torch.profiler.profile(activities=activities) as found:
        run()
        rig.device.synchronize()
    events = [(_microseconds(event, is_cuda), event) for event in found.key_averages()]
    events = sorted((pair for pair in events if pair[0] > 0), key=lambda pair: -pair[0])
    whole = sum(us for us, _ in events) or 1.0
    for us, event in events[:MOST_ROWS]:
        counts = {"calls a step": event.count / num_steps, "us a step": us / num_steps, "share": us / whole}
        put("profile", of=what, graphs=rig.settings.cuda_graphs, name=str(event.key)[:110], **counts)
    counts = {"us a step": whole / num_steps if events else 0.0, "share": 1.0}
    name = f"all {len(events)}"
    put("profile", of=what, graphs=rig.settings.cuda_graphs, name=name, **counts)


def _microseconds(event: Any, is_cuda: bool) -> float:
    """Time of its own: of the device, where it is a kernel or a copy there."""
    if not is_cuda:
        return float(event.self_cpu_time_total)
    return float(getattr(event, "self_device_time_total", 0.0) or getattr(event, "self_cuda_time_total", 0.0))
