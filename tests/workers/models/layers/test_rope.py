"""Rotary frequencies equal transformers' bit for bit, from configs of its fifth version and of those before."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from diptych.workers.common.errors import CheckpointError
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.layers.rope import inverse_frequencies, rope_tables

from ..families.test_spec import LLAMA, PHI3, write

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
    },
]


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(f"{v}" for v in s.values()))
@pytest.mark.parametrize("head_dim", [8, 64])
def test_frequencies_equal_transformers(tmp_path: Path, scaling: dict[str, Any], style: str, head_dim: int) -> None:
    config = LLAMA | {"head_dim": head_dim}
    if style == "rope_parameters":
        config |= {"rope_parameters": scaling | {"rope_theta": 500_000.0}}
    elif style == "rope_scaling":
        config |= {"rope_theta": 500_000.0, "rope_scaling": scaling}
    else:
        renamed = {"type" if k == "rope_type" else k: v for k, v in scaling.items()}
        config |= {"rope_theta": 500_000.0, "rope_scaling": renamed}
    spec = load_spec(write(tmp_path, config))
    [(rope, dim)] = spec.ropes
    inv_freq, attention_factor = inverse_frequencies(rope, dim, spec.max_position_embeddings, 1)

    reference = LlamaRotaryEmbedding(LlamaConfig.from_dict(json.loads(json.dumps(config))))
    assert rope.rope_type == scaling["rope_type"]
    assert torch.equal(inv_freq, reference.inv_freq)
    assert attention_factor == reference.attention_scaling

    positions = torch.arange(spec.max_position_embeddings)
    cos, sin = reference(torch.zeros(1), positions[None])
    [table] = rope_tables(spec, spec.max_position_embeddings, torch.device("cpu"))
    half = head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=1e-6)


def test_yarn_without_factor_stretches_to_the_models_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert load_spec(write(tmp_path, LLAMA | {"rope_scaling": scaling})).ropes[0][0].factor == 4.0


@pytest.mark.parametrize(
    ("longest", "scaling", "expected"),
    [
        (40_960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),  # Qwen3
        (163_840, {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163_840),  # DeepSeek
        (40_960, {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32_768}, 40_960),
        (256, {"rope_type": "yarn", "factor": 4.0}, 1024),
        (256, {"rope_type": "linear", "factor": 4.0}, 256),
    ],
)
def test_yarn_lengthens_what_a_context_may_have(
    tmp_path: Path, longest: int, scaling: dict[str, Any], expected: int
) -> None:
    """A value that is not requested is not changed."""
    spec = load_spec(write(tmp_path, LLAMA | {"max_position_embeddings": longest, "rope_scaling": scaling}))
    assert (spec.max_position_embeddings, spec.longest_context) == (longest, expected)


def test_yarn_of_a_damaged_factor_is_named(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 1e30, "original_max_position_embeddings": 4096}
    with pytest.raises(CheckpointError, match="factor of yarn must stretch contexts to at most"):
        load_spec(write(tmp_path, LLAMA | {"rope_scaling": scaling}))


def test_original_length_beside_the_rope_parameters_wins(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = LLAMA | {"rope_parameters": scaling, "original_max_position_embeddings": 64}
    assert load_spec(write(tmp_path, config)).ropes[0][0].original_max_position_embeddings == 64


@pytest.mark.parametrize("older", ["longrope", "su", "yarn"])
@pytest.mark.parametrize(("partial", "changes"), [(1.0, {}), (0.5, {"factor": 3.0}), (0.5, {"attention_factor": 1.7})])
def test_longrope_equals_transformers_on_both_sides_of_its_length(
    tmp_path: Path, older: str, partial: float, changes: dict[str, float]
) -> None:
    """A table for contexts that may be longer than the first length has the frequencies for long ones throughout."""
    num = int(16 * partial) // 2
    factors = {"short_factor": [1.0 + i / 8 for i in range(num)], "long_factor": [2.0 + i for i in range(num)]}
    config = PHI3 | {
        "rope_scaling": {"type": older, "original_max_position_embeddings": 64} | factors | changes,
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": 64,
    }
    spec = load_spec(write(tmp_path, config))
    reference = Phi3RotaryEmbedding(Phi3Config.from_dict(json.loads(json.dumps(config))))
    for length in (64, 65):
        cos, sin = reference(torch.zeros(1), torch.arange(length)[None])
        [table] = rope_tables(spec, length, torch.device("cpu"))
        torch.testing.assert_close(table[:, :num], cos[0, :, :num], rtol=0, atol=1e-6)
        torch.testing.assert_close(table[:, 8 : 8 + num], sin[0, :, :num], rtol=0, atol=1e-6)
        assert bool((table[:, num:8] == 1.0).all() and (table[:, 8 + num :] == 0.0).all())
