"""A checkpoint in fewer bits: whole, as its library reads it, and as this package does."""

import json
import os
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file

from diptych.workers.common.errors import CheckpointError, ConfigError, InsufficientMemory, UnsupportedArchitecture
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.quantize_job import WRITTEN, QuantizeJob
from diptych.workers.models.rounding import float8, int4, int8, mxfp4
from diptych.workers.quantize import checkpoint_writer
from diptych.workers.quantize.job import quantise

from ...support.checkpoints import make_checkpoint
from ..models.quant.test_formats import load, tensors_of
from .written import decoded_by_library, number_tokenizer, text_file, write

TWINS = {"int8": int8, "w8a8": int8, "fp8": float8, "mxfp4": mxfp4, "int4": int4}
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", 1, intermediate_size=192)
    number_tokenizer(path)
    (path / "notes.txt").write_text("about this model")
    (path / "pytorch_model.bin").write_bytes(b"weights of another kind")
    return path


@pytest.mark.parametrize("format", WRITTEN)
def test_what_is_read_back_is_what_was_rounded(format: str, source: Path, tmp_path: Path) -> None:
    made = write(source, tmp_path / "out", format)
    assert made.num_weights == 21
    assert made.num_bytes < (0.6 if WRITTEN[format].bits == 4 else 0.7) * made.before_bytes
    found, plain = (tensors_of(load(path, torch.float32)) for path in (tmp_path / "out", source))
    expected = tensors_of(load(decoded_by_library(tmp_path / "out", tmp_path / "plain"), torch.float32))
    for key in expected:
        rtol = 8e-3 if format == "nvfp4" else 2e-7  # the library multiplies in bfloat16
        torch.testing.assert_close(found[key], expected[key], rtol=rtol, atol=0)
    twin = TWINS.get(format)
    if twin is not None:
        # A whole checkpoint has one size of groups; at load each weight has its own.
        for key in ("0.qkv", "2.gate_up", "1.down", *(["1.o"] if format != "int4" else [])):
            assert torch.equal(found[key], twin.dequantise(*twin.quantise(plain[key])))
    else:
        assert (found["1.down"] - plain["1.down"]).norm() < 0.12 * plain["1.down"].norm()


def test_the_checkpoint_is_whole(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantise(QuantizeJob(str(source), str(out), "int4"), 4 << 30, shard_bytes=100_000)
    config, before = (json.loads((path / "config.json").read_text()) for path in (out, source))
    assert {k: v for k, v in config.items() if k != "quantization_config"} == before
    section = config["quantization_config"]
    scheme = QuantizationConfig.model_validate(section).config_groups["group_0"]
    assert isinstance(scheme, QuantizationScheme) and scheme.weights is not None
    assert scheme.weights.group_size == 64
    assert section["ignore"] == ["lm_head"]
    names = {path.name for path in out.iterdir()}
    assert {"tokenizer.json", "generation_config.json", "notes.txt"} <= names
    assert "pytorch_model.bin" not in names
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert sorted(set(index.values())) == files
    assert len(files) > 2
    assert files[0].startswith("model-00001-of-0000")
    assert all(name in load_file(out / file) for name, file in index.items())
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o666 & ~umask}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ignored_modules_stay_as_they_are(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = write(source, out, "fp8", ignore=(DOWN, r"re:.*layers\.0\.self_attn"))
    assert made.num_weights == 21 - 5
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    kept = {f"model.layers.0.self_attn.{of}_proj" for of in "qkvo"} | {DOWN, "lm_head"}
    assert set(section["ignore"]) == kept
    found, plain = (tensors_of(load(path, torch.float32)) for path in (out, source))
    for key in ("0.qkv", "0.o", "1.down"):
        assert torch.equal(found[key], plain[key])
    assert not torch.equal(found["2.down"], plain["2.down"])


def test_nothing_is_left_of_what_fails(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "save_file", full)
    with pytest.raises(ConfigError, match=r"cannot be written .*No space left.*free space"):
        write(source, tmp_path / "out", "int8")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_quantised_is_named(source: Path, tmp_path: Path) -> None:
    write(source, tmp_path / "out", "w8a8")
    with pytest.raises(ConfigError, match="exists already"):
        write(source, tmp_path / "out", "int8")
    with pytest.raises(CheckpointError, match="is quantised already: quantise the checkpoint that it was made from"):
        write(tmp_path / "out", tmp_path / "again", "int8")
    with pytest.raises(InsufficientMemory, match=r"takes at least 0\.\d\d GiB, but 0\.00 are free or allowed"):
        quantise(QuantizeJob(str(source), str(tmp_path / "again"), "int8"), 1 << 20)
    experts = make_checkpoint(tmp_path / "gptoss", "gptoss", 1)
    with pytest.raises(UnsupportedArchitecture, match=r"experts.gate_up_proj .*no format: serve it with --quantize"):
        write(experts, tmp_path / "again", "int8")
    odd = make_checkpoint(tmp_path / "odd", "llama", 1, intermediate_size=72)
    with pytest.raises(
        ConfigError, match=r"down_proj.weight has 72 inputs, which groups of 32 do not divide: .*ignore"
    ):
        write(odd, tmp_path / "again", "mxfp4")
    write(odd, tmp_path / "again", "mxfp4", ignore=("re:.*down_proj",))
    assert load_spec(tmp_path / "again").num_layers == 3


def test_weights_that_are_not_finite_are_named(source: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    tensors[f"{DOWN}.weight"][3, 5] = torch.nan
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {DOWN}.weight has numbers that are not finite"):
        write(broken, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"format": "int5"}, "--format must be one of int8, int4, w8a8, fp8, mxfp4, nvfp4, got 'int5'"),
        ({"method": "magic"}, "--method must be one of rtn, gptq, awq, smoothquant"),
        ({"method": "gptq"}, "--method gptq needs --calibrate FILE"),
        ({"method": "smoothquant"}, "--method smoothquant does not make int4: use rtn or gptq or awq"),
        ({"method": "rtn", "calibrate": "TEXT"}, "changes nothing of int4 by rtn: use --method gptq or awq, or leave"),
        ({"format": "fp8", "calibrate": "TEXT"}, "changes nothing of fp8 by rtn: leave --calibrate out"),
        ({"calibrate": "nowhere.txt"}, "nowhere.txt is no file"),
        ({"group_size": 48}, "--group-size must be one of 128, 64, 32, with --format int4, got 48"),
        ({"format": "int8", "group_size": 32}, "with --format int4"),
        ({"ignore": ("re:(",)}, r"--ignore 're:\(' is no regular expression"),
        ({"samples": 0}, "--samples must be at least 1"),
        ({"sequence_tokens": 1}, "--sequence-tokens must be at least 2"),
        ({"damping": 1.5}, "--damping must be between 0 and 1"),
        ({"memory_bytes": 0}, "--memory-gib must be above 0"),
        ({"out": "no/such/folder"}, "its parent is no folder"),
    ],
)  # fmt: skip
def test_what_is_asked_for_must_make_sense(more: dict[str, object], named: str, tmp_path: Path) -> None:
    values: dict[str, object] = {"model": "m", "out": str(tmp_path / "out"), "format": "int4"} | more
    if values.get("calibrate") == "TEXT":
        values["calibrate"] = str(text_file(tmp_path / "text"))
    job = QuantizeJob(**values)  # type: ignore[arg-type]
    assert QuantizeJob.from_json(json.loads(json.dumps(job.to_json()))) == job
    with pytest.raises(ConfigError, match=named):
        job.check()
