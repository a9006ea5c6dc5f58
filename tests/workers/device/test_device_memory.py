"""A device with too little memory: errors at load name the purpose and the remedy; a step ends its large requests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.workers.common.errors import ConfigError, DeviceLost, OutOfDeviceMemory
from diptych.workers.common.request import Request
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.device.device_errors import is_full, lost, needing_memory
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.device.kv_cache import KVCache
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.kv.layout import KVLayout
from diptych.workers.kv.staging import STAGING_BYTES

from ...support.checkpoints import untied_prompts
from ...support.engines import assert_clean, tokens
from ...support.gpu.serving import GREEDY, early, generate, late, load, steps_of

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation"


class Scarce(TorchDispatchMode):
    """Within this context, allocations for which `is_refused` is true fail."""

    def __init__(self, is_refused: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._is_refused = is_refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, Tensor) and not func._schema.is_mutable and not func.is_view
        if is_new and self._is_refused(result):
            raise torch.OutOfMemoryError(FULL)
        return result


def of(*shape: int, dtype: torch.dtype) -> Callable[[Tensor], bool]:
    return lambda tensor: tensor.shape == shape and tensor.dtype == dtype


VOCAB, HIDDEN, DIM = 500, 64, 16
STAGES = {
    "the model's weights: end what else uses it, serve a smaller model": of(VOCAB, HIDDEN, dtype=torch.float32),
    "the buffers that tokens are sampled with: lower max_running": of(6, VOCAB, dtype=torch.int32),
    "the buffers of hand-offs: lower kv_memory_fraction": of(STAGING_BYTES, dtype=torch.uint8),
    "the angles of all positions: lower kv_memory_fraction or max_context_tokens": of(512, DIM, dtype=torch.float32),
    "the buffers and graphs of steps: lower kv_memory_fraction (or kv_memory_bytes) or max_running": of(
        6, 512 // 16, dtype=torch.int32
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_wherever_it_strikes_at_load_the_operator_is_told_what_to_do(llama: Path, stage: str) -> None:
    with Scarce(STAGES[stage]), pytest.raises(ConfigError) as caught:
        load(llama, late(), cuda_graphs=False)
    assert f"too little memory left for {stage}" in caught.value.message
    assert caught.value.message.endswith("(CUDA out of memory. Tried to allocate 2.00 GiB.)")


def test_memory_that_cannot_be_pinned_is_told_likewise(llama: Path) -> None:
    class NothingToPin(FakeDevice):
        def pinned(self, *_: object) -> Tensor:
            raise torch.AcceleratorError("CUDA error: out of memory\nFor debugging consider ...")

    with pytest.raises(ConfigError, match=r"the model's weights: .* \(CUDA error: out of memory\)$"):
        load(llama, NothingToPin())


def test_a_pool_that_does_not_fit_is_told_likewise() -> None:
    layout = KVLayout("float32", 16, 3, 2, 8, "m")
    with (
        Scarce(lambda tensor: len(tensor) == 1),
        pytest.raises(ConfigError, match="5 KV blocks: lower kv_memory_fraction"),
    ):
        KVCache(layout, 5, torch.device("meta"))


@pytest.mark.parametrize(
    ("error", "is_full_"),
    [
        (torch.OutOfMemoryError(FULL), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), False),
    ],
)
def test_a_device_that_is_full_is_not_lost(error: Exception, is_full_: bool) -> None:
    assert is_full(error) is is_full_ and (lost(error) is None) is is_full_
    with pytest.raises(ConfigError if is_full_ else DeviceLost), needing_memory("it", "do something"):
        raise error


def test_what_is_not_the_devices_keeps_its_name() -> None:
    with pytest.raises(ValueError, match="out of memory"), needing_memory("it", "do something"):
        raise ValueError("out of memory")


@contextmanager
def limited(part: Any, most: int) -> Iterator[list[int]]:
    """A step with more than `part` prompt tokens runs out of memory while its layers are computed."""
    refused: list[int] = []
    run, run_on_lane = part.run, part.lane.run

    def run_if_it_fits(numbers: Any, *args: Any, **kwargs: Any) -> Any:
        def refuse_the_head(work: Any) -> None:
            if work.__class__ is not partial:
                refused.append(numbers.num_tokens)
                raise torch.OutOfMemoryError(FULL)
            run_on_lane(work)

        part.lane.run = refuse_the_head if numbers.num_tokens > most else run_on_lane
        return run(numbers, *args, **kwargs)

    part.run = run_if_it_fits
    yield refused
    part.run, part.lane.run = run, run_on_lane


@pytest.mark.parametrize("device", [late, early])
def test_a_prompt_that_does_not_fit_ends_and_all_else_goes_on(llama: Path, device: Callable[[], FakeDevice]) -> None:
    prompts = [prompt for prompt, _ in untied_prompts(llama, seed=5, lengths=[15, 17, 100], max_tokens=16)]
    samplings = [GREEDY, replace(GREEDY, frequency_penalty=0.5), GREEDY]
    expected = generate(load(llama, None), prompts, samplings).token_ids
    runner = load(llama, device())
    engine = Engine(runner, SchedulerConfig())
    outputs: list[StepOutput] = []
    with limited(steps_of(runner)._own.prompts, most=50) as refused:
        for i, prompt in enumerate(prompts):
            engine.submit(f"0/{i}", Request(str(i), tuple(prompt), samplings[i], 600.0), [])
            outputs += [engine.step() for _ in range(3)]
        while engine.scheduler.has_work or engine.steps:
            outputs.append(engine.step())
    [failure] = [failure for output in outputs for failure in output.failures]
    assert refused and failure.key == "0/2" and isinstance(failure.error, OutOfDeviceMemory)
    assert "lower kv_memory_fraction (or kv_memory_bytes), or max_batch_tokens" in failure.error.message
    found = [[event.token_id for event in tokens(outputs, f"0/{i}")] for i in range(2)]
    assert found == expected[:2]
    assert_clean(engine)
    assert generate(runner, prompts, samplings).token_ids == expected
