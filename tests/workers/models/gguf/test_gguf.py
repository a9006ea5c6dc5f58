"""GGUF files of each family, as llama.cpp's converter writes them: their config and weights are those of the checkpoint
that they mean, whole and by shares."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import LayerSpec, ModelSpec
from diptych.workers.models.layers.rope import rope_tables
from diptych.workers.models.plan.sharding import WHOLE, share_of_first
from diptych.workers.models.quant import stored_weight

from ....support.checkpoints import make_checkpoint, random_prompts, reference_model
from ..layers.test_decoder import assert_equal, prompt_logits
from ..quant.test_formats import CPU, load, tensors_of
from .gguf_writer import write_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
YARN_LATENT = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
LATENT_32 = {"qk_nope_head_dim": 32, "v_head_dim": 32}  # blocks have 32 numbers
# Name of each: the checkpoint's, and what is other than its config there.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3moe", {"norm_topk_prob": True, "mlp_only_layers": []}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {}),
    "phi3, short": ("phi3", {"rope_parameters": None, "sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "gpt-oss": ("gptoss", {}),
    "deepseek-v2": ("deepseek-v2", {"rope_parameters": YARN_LATENT} | LATENT_32),
    "deepseek-v3": ("deepseek-v3", LATENT_32 | {"q_lora_rank": 32}),
}


def without_ropes(spec: ModelSpec) -> ModelSpec:
    """Leave out what stretches frequencies: it may be said in several ways, and tables are compared instead."""

    def plain(layer: LayerSpec) -> LayerSpec:
        rope = layer.attention.rope
        return replace(layer, attention=replace(layer.attention, rope=replace(rope, **STRETCH)))

    return replace(spec, layers=tuple(plain(layer) for layer in spec.layers))


STRETCH: dict[str, Any] = {
    "rope_type": "default",
    "factor": 1.0,
    "original_max_position_embeddings": 0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "attention_factor": None,
    "short_factors": (),
    "long_factors": (),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_means_its_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weight, "PIECE_NUMBERS", 720)  # rows at once: 11, 5 and 4, which begin within heads
    arch, changes = FAMILIES[name]
    path, plain = write_gguf(make_checkpoint(tmp_path / "source", arch, 1, **changes), tmp_path)
    spec, expected = load_spec(path), load_spec(plain)
    assert without_ropes(spec) == without_ropes(expected)
    for found, wanted in zip(*(rope_tables(of, 900, CPU) for of in (spec, expected)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4 if "llama 3" in name else 0)
    shares = [WHOLE, *(replace(share_of_first(spec, 2), rank=rank) for rank in range(2))]
    for share in shares:
        ours, theirs = (tensors_of(load(of, torch.float32, share)) for of in (path, plain))
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_what_the_numbers_mean(name: str, tmp_path: Path) -> None:
    arch, changes = FAMILIES[name]
    path, plain = write_gguf(make_checkpoint(tmp_path / "source", arch, 3, **changes), tmp_path)
    [prompt] = random_prompts(4, [70])
    with torch.inference_mode():
        expected = reference_model(plain)(torch.tensor([prompt])).logits[0]
    assert_equal(prompt_logits(path, prompt, [4, 2, 0, 1, 3]), expected)


@pytest.mark.parametrize("type_", [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS])
def test_blocks_of_256_numbers(type_: Type, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 32}
    source = make_checkpoint(tmp_path / "source", "llama", 2, **sizes)
    path, plain = write_gguf(source, tmp_path, lambda _: type_)
    ours, theirs = (tensors_of(load(of, torch.float32)) for of in (path, plain))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_older_files(name: str, tmp_path: Path) -> None:
    """Each expert is a tensor of its own, and what makes KV of latents is one."""
    arch, changes = FAMILIES[name]
    path, plain = write_gguf(make_checkpoint(tmp_path / "source", arch, 1, **changes), tmp_path, older=True)
    assert without_ropes(load_spec(path)) == without_ropes(load_spec(plain))
    ours, theirs = (tensors_of(load(of, torch.float32)) for of in (path, plain))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_gemma_of_the_largest_size_scales_scores_otherwise(tmp_path: Path) -> None:
    """llama.cpp knows it by its number of layers: no file says so."""
    small = {"num_hidden_layers": 62, "layer_types": ["sliding_attention"] * 62, "intermediate_size": 32}
    source = make_checkpoint(tmp_path / "source", "gemma3", 1, query_pre_attn_scalar=8, **small)
    path, plain = write_gguf(source, tmp_path, lambda _: Type.F16)
    assert [of.attention.scale for of in load_spec(path).layers] == [8**-0.5] * 62
    assert without_ropes(load_spec(path)) == without_ropes(load_spec(plain))


def test_tokens_that_end_answers_are_known_by_id_and_text(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(7)

    source = make_checkpoint(tmp_path / "source", "llama", 1, num_hidden_layers=1)
    path, _ = write_gguf(source, tmp_path, change=change)
    assert load_spec(path).eos_token_ids == (0, 7)
