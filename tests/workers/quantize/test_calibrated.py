"""Calibration: text goes through a model as the model computes it, and what is made of it is better than rounding."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych.kernels.elementwise.rms_norm import rms_norm
from diptych.workers.common.errors import CheckpointError, ConfigError, UnsupportedArchitecture
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.quantize_job import QuantizeJob
from diptych.workers.models.plan.quantize_plan import Product, hessian_bytes, planned_weights
from diptych.workers.quantize.calibration_text import read_sequences
from diptych.workers.quantize.job import quantise
from diptych.workers.quantize.layer_runs import CPU, LayerRuns
from diptych.workers.quantize.memory_needs import memory_needs, passes
from diptych.workers.quantize.overlaid_checkpoint import OverlaidCheckpoint
from diptych.workers.quantize.statistics import InputStatistics

from ...support.checkpoints import make_checkpoint, random_prompts, reference_model
from ..models.quant.test_formats import load, tensors_of
from .written import AVAILABLE, number_tokenizer, text_file, write

LENGTHS = (40, 18, 33)
JOB = QuantizeJob("", "", "int4")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", 1)
    number_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text") / "text.txt")


def final_hidden(path: Path, sequences: list[list[int]]) -> list[Tensor]:
    """Normed residuals after the last layer."""
    spec = load_spec(path)
    with torch.inference_mode(), OverlaidCheckpoint(path, spec) as checkpoint:
        runs, reader = LayerRuns(checkpoint, sequences), checkpoint.reader(torch.float32, CPU)
        for fields in reader.layers():
            runs.advance(fields.as_layer())
        norm = reader.outer().tensor("norm")
        return [rms_norm(residual, norm, spec.rms_norm_eps) for residual in runs.residuals]


@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen3moe", "deepseek-v2", "phi3", "phi3-long"])
def test_text_goes_through_the_model_as_transformers_computes_it(arch: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / arch, arch, 2)
    sequences = random_prompts(3, LENGTHS)
    model = reference_model(path)
    for ids, found in zip(sequences, final_hidden(path, sequences), strict=True):
        with torch.inference_mode():
            expected = model.model(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen3moe", "deepseek-v3", "phi3"])
def test_statistics_are_those_of_what_enters_each_product(arch: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / arch, arch, 2)
    spec, sequences = load_spec(path), random_prompts(3, LENGTHS)
    with OverlaidCheckpoint(path, spec) as checkpoint:
        runs = LayerRuns(checkpoint, sequences)
        for i, fields in enumerate(checkpoint.reader(torch.float32, CPU).layers()):
            weights = planned_weights(spec, i, JOB)
            found = {of.product: InputStatistics.empty(of.num_inputs) for of in weights}
            layer = fields.as_layer()
            runs.gather(layer, found)
            entered = torch.cat([rms_norm(of, layer.input_norm, spec.rms_norm_eps) for of in runs.residuals])
            own = found[Product("qkv")]
            torch.testing.assert_close(own.hessian, entered.T @ entered, rtol=1e-4, atol=1e-3)
            routed = [of.num_tokens for product, of in found.items() if product == (product.field, product.expert)]
            assert min(routed) >= 0
            for product, of in found.items():
                assert of.num_tokens == sum(LENGTHS) or product.expert is not None
            experts = [of.num_tokens for p, of in found.items() if p.field == "experts_down"]
            per_token = getattr(spec.layers[i].feed_forward, "routing", None)
            assert sum(experts) == (per_token.top_k * sum(LENGTHS) if per_token else 0)
            runs.advance(layer)


def product_error(path: Path, source: Path, sequences: list[list[int]]) -> float:
    """Relative difference of the last hidden states."""
    pairs = zip(final_hidden(path, sequences), final_hidden(source, sequences), strict=True)
    found, expected = (torch.cat(of) for of in zip(*pairs, strict=True))
    return float((found - expected).norm() / expected.norm())


def with_outliers(source: Path, folder: Path) -> Path:
    """Copy a model, with some inputs of its products much larger than others, as those of large ones are."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[::11] *= 12
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("format", "method"), [("int4", "gptq"), ("int4", "awq"), ("int8", "gptq")])
def test_a_calibrated_model_is_nearer_than_a_rounded_one(
    format: str, method: str, source: Path, text: Path, tmp_path: Path
) -> None:
    """On text of its kind that it was not calibrated by."""
    if method == "awq":
        source = with_outliers(source, tmp_path / "source")
    write(source, tmp_path / "rtn", format)
    write(source, tmp_path / "made", format, calibrate=str(text), method=method, samples=24, sequence_tokens=64)
    unseen = text_file(tmp_path / "unseen.txt", seed=9, num_words=400)
    sequences = read_sequences(source, unseen, 8, 50, 500)
    made, rounded = (product_error(tmp_path / of, source, sequences) for of in ("made", "rtn"))
    assert made < 0.95 * rounded


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma2", "phi3", "deepseek-v3", "mixtral"])
def test_other_families_calibrate_too(arch: str, text: Path, tmp_path: Path) -> None:
    ranks: dict[str, Any] = {"q_lora_rank": 32} if arch == "deepseek-v3" else {}  # which groups divide
    path = make_checkpoint(tmp_path / arch, arch, 2, **ranks)
    number_tokenizer(path)
    for method in ("gptq", "awq"):
        out = tmp_path / method
        write(path, out, "int4", calibrate=str(text), method=method, samples=6, sequence_tokens=40)
        found, plain = (tensors_of(load(of, torch.float32)) for of in (out, path))
        assert found.keys() == plain.keys()
        sequences = random_prompts(3, LENGTHS)
        assert product_error(out, path, sequences) < 0.6


def test_a_smoothed_model_is_the_same_model(source: Path, text: Path, tmp_path: Path) -> None:
    """What norms are divided by, weights are multiplied by; an ignored one beside them, too."""
    ignored = "model.layers.0.self_attn.k_proj"
    options: dict[str, Any] = {"calibrate": str(text), "samples": 4, "ignore": (ignored,)}
    write(source, tmp_path / "out", "w8a8", **options)
    found, plain = (load_file(path / "model.safetensors") for path in (tmp_path / "out", source))
    norm = "model.layers.0.input_layernorm.weight"
    scales = plain[norm] / found[norm]
    assert scales.std() > 0.1
    torch.testing.assert_close(found[f"{ignored}.weight"], plain[f"{ignored}.weight"] * scales, rtol=1e-4, atol=1e-6)
    assert product_error(tmp_path / "out", source, random_prompts(3, LENGTHS)) < 0.06


def test_less_memory_makes_the_same_checkpoint(source: Path, text: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"calibrate": str(text), "samples": 5, "sequence_tokens": 32}
    spec = load_spec(source)
    job = QuantizeJob(str(source), str(tmp_path / "least"), "int4", **options)
    size = (source / "model.safetensors").stat().st_size
    needs = memory_needs(spec, job, [32] * 5, size)
    assert needs.least < needs.most
    for name, available in (("least", needs.least), ("most", AVAILABLE)):
        quantise(QuantizeJob(str(source), str(tmp_path / name), "int4", **options), available, shard_bytes=size)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("least", "most"))
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_passes_hold_what_fits() -> None:
    spec = load_spec(Path(__file__).parents[3] / "examples" / "tiny")
    weights = planned_weights(spec, 0, JOB)
    sizes = {of.product: hessian_bytes(of) for of in weights}
    assert passes(weights, sum(sizes.values())) == [weights]
    several = passes(weights, max(sizes.values()))
    assert [of for part in several for of in part] == weights
    assert [sorted({of.product.field for of in part}) for part in several] == [["gate_up", "o", "qkv"], ["down"]]
    assert [len({of.product for of in part}) for part in passes(weights, 0)] == [1, 1, 1, 1]


def test_text_is_cut_into_sequences(source: Path, tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text(" ".join(str(i) for i in range(100)))
    assert read_sequences(source, plain, 99, 30, 500) == [[*range(i, min(i + 30, 100))] for i in range(0, 100, 30)]
    assert [of[0] for of in read_sequences(source, plain, 2, 10, 500)] == [0, 50]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "1 2 3 4 5"}\n\n{"text": "6"}\n{"text": "7 8", "of": 1}\n')
    assert read_sequences(source, lines, 99, 3, 500) == [[1, 2, 3], [7, 8]]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.txt", b"", "has no text of at least 2 tokens"),
        ("a.txt", b"\xff\xfe\xff", "cannot be read as UTF-8"),
        ("a.jsonl", b'{"text": "1 2"}\n{"text"', "line 2 is no JSON"),
        ("a.jsonl", b'{"prompt": "1 2"}', "line 1 must be an object with a string `text`"),
        ("a.jsonl", b"[1]", "line 1 must be an object"),
    ],
)
def test_text_that_cannot_serve_is_named(name: str, content: bytes, named: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=named):
        read_sequences(source, tmp_path / name, 4, 16, 500)


def test_what_cannot_be_calibrated_is_named(text: Path, tmp_path: Path) -> None:
    bare = make_checkpoint(tmp_path / "bare", "llama", 1, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json, .*write one"):
        write(bare, tmp_path / "out", "int4", calibrate=str(text))
    shared = make_checkpoint(tmp_path / "shared", "gemma4", 1)
    with pytest.raises(UnsupportedArchitecture, match=r"read another one's KV.*Leave --calibrate out"):
        write(shared, tmp_path / "out", "int4", calibrate=str(text))
    after = make_checkpoint(tmp_path / "after", "olmo2", 1)
    with pytest.raises(UnsupportedArchitecture, match=r"has no norm before its products.*gptq or rtn"):
        write(after, tmp_path / "out", "int4", calibrate=str(text), method="awq")
    number_tokenizer(bare, 600)
    with pytest.raises(CheckpointError, match="has tokens that the model of 500 has not"):
        write(bare, tmp_path / "out", "int4", calibrate=str(text_file(tmp_path / "t", vocab_size=600)))
