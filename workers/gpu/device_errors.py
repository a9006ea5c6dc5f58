"""What torch says when a GPU fails, by our name."""

import torch

from ..errors import DeviceLost


def lost(error: Exception) -> DeviceLost | None:
    """What no later step on the device can survive; None: it is something else."""
    if not isinstance(error, torch.AcceleratorError) and "CUDA error" not in str(error):
        return None
    return DeviceLost(
        f"the GPU failed in a step ({error}): the worker ends and is to be started again; if it happens again, look at "
        "the GPU's log (dmesg, nvidia-smi -q)"
    )
