"""Translation of torch's errors of a failed or full GPU to Diptych's."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from ..common.errors import ConfigError, DeviceLost, OutOfDeviceMemory, RankLost, TransportError

_TOLD_AS = ("CUDA error", "Triton Error [CUDA]")  # by torch's libraries, and by Triton's launches
_FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # texts of such errors that mean too little memory


def is_full(error: Exception) -> bool:
    """Return whether memory of the device, or of the host to be pinned, has run out. What exists is unchanged."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return _is_the_device_s(error) and any(told in str(error) for told in _FULL)


def lost(error: Exception) -> DeviceLost | None:
    """Return a DeviceLost if no later step on the device can survive `error`; None: it is something else."""
    if is_full(error) or not _is_the_device_s(error):
        return None
    return DeviceLost(
        f"the GPU failed ({_first_line(error)}): the worker ends and is to be started again; if it happens again, look "
        "at the GPU's log (dmesg, nvidia-smi -q)"
    )


def of_step(error: Exception) -> OutOfDeviceMemory | DeviceLost | None:
    """Return the error to raise for a step that raised `error`; None: it is something else."""
    if not is_full(error):
        return lost(error)
    return OutOfDeviceMemory(
        f"the GPU has too little memory left for this step: lower kv_memory_fraction (or kv_memory_bytes), or "
        f"max_batch_tokens ({_first_line(error)})"
    )


def of_copy(error: Exception) -> TransportError | None:
    """Return the error to raise for a copy of KV that raised `error`; None: it is something else."""
    if is_full(error) or lost(error) is not None:
        return TransportError(f"the GPU could not copy KV: {_first_line(error)}")
    return None


LESS_KV = "lower kv_memory_fraction (or kv_memory_bytes)"  # a remedy


@contextmanager
def needing_memory(what: str, remedy: str) -> Generator[None]:
    """Translate errors of a worker's start. Raises ConfigError where there is too little memory for `what`, RankLost
    (DeviceLost) where the device fails, and any other error of the body unchanged."""
    try:
        yield
    except (RankLost, ConfigError):
        raise
    except Exception as e:
        if is_full(e):
            raise ConfigError(f"the GPU has too little memory left for {what}: {remedy} ({_first_line(e)})") from e
        if (device_lost := lost(e)) is not None:
            raise device_lost from e
        raise


def _is_the_device_s(error: Exception) -> bool:
    return isinstance(error, torch.AcceleratorError) or any(told in str(error) for told in _TOLD_AS)


def _first_line(error: Exception) -> str:
    """The rest is advice to whoever debugs torch."""
    return str(error).partition("\n")[0]
