"""Weights quantised at load: how they are stored, and that torch and the compiled kernels use the same values."""

from pathlib import Path

import pytest
import torch

from diptych.kernels.cpu.formats import Format, NumberLayout, group_of
from diptych.kernels.cpu.load import library
from diptych.workers.common.errors import ConfigError
from diptych.workers.common.request import SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.models.checkpoint.weights import Checkpoint, load_weights
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.formats import QUANTIZE, format_of
from diptych.workers.models.rounding import int4, int8
from diptych.workers.models.rounding.numbers import meant
from diptych.workers.models.rounding.stored import TWINS, as_stored_, numbers_of

from ...support.largest import Largest
from ...support.serving import Server

PROMPTS = [[5, 9, 17, 3, 8], [44, 2] * 20]


def tokens(path: Path, isa: str, quantize: str) -> list[list[int]]:
    config = WorkerConfig.of(path, dtype="float32", max_context_tokens=128, cpu_isa=isa, quantize=quantize)
    server = Server(ModelRunner.load(config), SchedulerConfig())
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return [[token.token_id for token in row] for row in server.generate(PROMPTS, [sampling] * len(PROMPTS))]


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8", "w8a8", "mxfp4"])
def test_compiled_as_by_torch(llama: Path, quantize: str) -> None:
    assert tokens(llama, "auto", quantize) == tokens(llama, "none", quantize)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_errors_are_half_a_step(quantize: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 576)
    if quantize == "int8":
        found, step = int8.dequantise(*int8.quantise(weight)), int8.quantise(weight)[1].expand_as(weight)
        assert ((found - weight).abs() <= step / 2 * 1.001).all()
    else:
        q, scales = int4.quantise(weight)
        step = scales.abs().repeat_interleave(64, dim=1)
        inside = (weight / step).abs() < 7.5
        assert ((int4.dequantise(q, scales) - weight).abs()[inside] <= step[inside] / 2 * 1.001).all()
        assert ((int4.dequantise(q, scales) - weight).abs() <= step * 1.001).all()


def test_products_alone_are_quantised(llama: Path) -> None:
    spec = load_spec(llama)
    with Checkpoint(llama, spec) as checkpoint:
        plain = load_weights(checkpoint.reader(torch.float32, torch.device("cpu")))
        found = load_weights(checkpoint.reader(torch.float32, torch.device("cpu"), quantize="int4"))
    assert torch.equal(found.embed, plain.embed)
    assert torch.equal(found.layers[0].input_norm, plain.layers[0].input_norm)
    assert torch.equal(found.layers[1].down, as_stored_(plain.layers[1].down.clone(), Format.INT4))
    assert not torch.equal(found.layers[1].down, plain.layers[1].down)
    assert format_of("int4", "lm_head") == Format.INT8


@pytest.mark.parametrize("format", TWINS)
@pytest.mark.parametrize("has_scales", [False, True])
def test_experts_are_quantised_some_rows_at_a_time(
    format: Format, has_scales: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of all at once, but of no more memory at once than a few rows take."""
    torch.manual_seed(0)
    weight = torch.randn(6, 64, 96, dtype=torch.bfloat16)
    rows, kind = weight.flatten(0, 1), TWINS[format]
    scales = kind.scales_of(rows) * 2 if has_scales else None
    expected = kind.dequantise(*kind.quantise(rows, scales)).to(weight.dtype).view_as(weight)
    monkeypatch.setattr("diptych.workers.models.rounding.stored.PIECE_BYTES", 4 * 96 * 50)
    found = weight.clone()
    with Largest() as largest:
        assert as_stored_(found, format, scales) is found
    assert torch.equal(found, expected)
    assert largest.num_bytes == max(weight.nbytes, 4 * 96 * 50)
    if format in (Format.FP8, Format.TABLE4):
        made = numbers_of(rows, format, scales)
        layout = NumberLayout(format, group_of(format, 96))
        assert torch.equal(meant(made, layout).to(weight.dtype).view_as(weight), expected)


def test_kv_of_other_weights_has_another_name(llama: Path) -> None:
    config = WorkerConfig.of(llama, dtype="float32", max_context_tokens=128, cpu_isa="none")
    configs = [config, *(config.changed(quantize=of) for of in QUANTIZE)]
    assert len({ModelRunner.load(c).layout.model_id for c in configs}) == 1 + len(QUANTIZE)


def test_unknown_format(llama: Path) -> None:
    with pytest.raises(
        ConfigError, match="quantize: Input should be 'int8', 'int4', 'fp8', 'w8a8' or 'mxfp4', got 'int3'"
    ):
        ModelRunner.load(WorkerConfig.of(llama, quantize="int3"))
