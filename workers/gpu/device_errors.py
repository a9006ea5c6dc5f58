"""What torch says when a GPU fails, by our name."""

import torch

from ..errors import DeviceLost

_TOLD_AS = ("CUDA error", "Triton Error [CUDA]")  # by torch's libraries, and by Triton's launches


def lost(error: Exception) -> DeviceLost | None:
    """What no later step on the device can survive; None: it is something else."""
    if not isinstance(error, torch.AcceleratorError) and not any(told in str(error) for told in _TOLD_AS):
        return None
    return DeviceLost(
        f"the GPU failed in a step ({error}): the worker ends and is to be started again; if it happens again, look at "
        "the GPU's log (dmesg, nvidia-smi -q)"
    )
