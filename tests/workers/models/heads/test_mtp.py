"""MTP modules compute what their formats say, under all names that are published, and wrong ones are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.workers.common.errors import CheckpointError, ConfigError, DiptychError, UnsupportedArchitecture
from diptych.workers.models.checkpoint.weights import Checkpoint
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import ModelSpec
from diptych.workers.models.head_specs.head_config import read_head_spec
from diptych.workers.models.head_specs.head_spec import HiddenState
from diptych.workers.models.heads.draft_head import SharedWeights
from diptych.workers.models.heads.loading import load_head

from ....support.heads import MTP_NAMES, SPECULATORS, make_mtp, read_head, save_head
from ....support.paged_head import CPU, PagedHead
from ...conftest import CheckpointOf
from .twins import PlainDeepseek, PlainLayer, PlainMtp

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shared_of(target: ModelSpec) -> SharedWeights:
    shape = (target.vocab_size, target.hidden_size)
    return SharedWeights(normal(*shape, seed=8), normal(*shape, seed=9) / 8)


def plain_of(folder: Path, names: str, shared: SharedWeights) -> PlainMtp:
    config, stored = read_head(folder)
    inner: dict[str, Any] = config.get("transformer_layer_config", config)
    outside, prefix = MTP_NAMES[names]
    prefix = prefix.format(inner["num_hidden_layers"])
    by_stored = {f"{theirs}.weight": f"{own}.weight" for own, theirs in outside.items()}
    tensors = {
        by_stored.get(name, name.removeprefix(prefix)): tensor
        for name, tensor in stored.items()
        if name in by_stored or name.startswith(prefix)
    }
    settings = inner | {"rope_theta": inner["rope_parameters"]["rope_theta"]}
    kind = PlainDeepseek if "kv_lora_rank" in inner else PlainLayer
    norm_output = names != "deepseek"
    return PlainMtp(kind(settings, tensors, ""), tensors, shared.embed, shared.lm_head, norm_output=norm_output)


@pytest.mark.parametrize(
    ("arch", "names", "alone"),
    [
        ("llama", "deepseek", False),
        ("llama", "deepseek", True),
        ("qwen3", "deepseek", True),
        ("deepseek-v3", "deepseek", False),
        ("deepseek-v3", "deepseek", True),
        ("llama", "qwen3-next", True),
        ("qwen3", SPECULATORS, True),
    ],
)
def test_a_chunk_and_steps_that_are_fed_back_equal_the_plain_computation(
    arch: str, names: str, alone: bool, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    folder = make_mtp(tmp_path, checkpoint_of(arch), names, seed=len(arch), alone=alone)
    target = load_spec(checkpoint_of(arch))
    shared = shared_of(target)
    paged = PagedHead(load_head(folder, target, shared, torch.float32, CPU))
    plain = plain_of(folder, names, shared)
    hidden, token_ids = normal(33, 64, seed=1), torch.arange(33) * 17 % 500
    assert torch.equal(paged.head.enter(hidden), hidden)
    last = hidden[:0]
    for first, end in ((0, 20), (20, 21), (21, 22), (22, 23), (23, 24), (24, 33)):
        # Two steps of the target's hidden states, two of what the head returned, and a chunk again.
        given = last[-1:] if first in (22, 23) else hidden[first:end]
        found, expected = (of.forward(token_ids[first:end], given) for of in (paged, plain))
        torch.testing.assert_close(found, expected, **TOLERANCE)
        torch.testing.assert_close(paged.head.logits(found), plain.logits(expected), **TOLERANCE)
        last = found
    assert paged.head.to_target(torch.tensor([0, 499])).tolist() == [0, 499]


def test_fields_of_a_module(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    for arch, kv in (("llama", (1, 2, 16, 2)), ("deepseek-v3", (1, 1, 40, 1))):
        target = load_spec(checkpoint_of(arch))
        folder = make_mtp(tmp_path / arch, checkpoint_of(arch), "deepseek", seed=1, alone=True)
        spec = read_head_spec(folder, target)
        assert (spec.method, spec.takes, spec.hidden_layers) == ("mtp", HiddenState.FINAL_NORMED, ())
        assert (spec.aux_size, spec.draft_vocab_size) == (64, 500)
        assert (spec.kv.num_layers, spec.kv.num_heads, spec.kv.dim, spec.kv.num_vectors) == kv


def test_a_target_with_a_module_is_served_as_without(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    folder = make_mtp(tmp_path, checkpoint_of("deepseek-v3"), "deepseek", seed=1, alone=False)
    spec = load_spec(folder)
    with Checkpoint(folder, spec) as checkpoint, Checkpoint(checkpoint_of("deepseek-v3"), spec) as plain:
        assert checkpoint.fingerprint() == plain.fingerprint()


def test_of_several_modules_the_first_is_used(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    target, hidden = load_spec(checkpoint_of("llama")), normal(5, 64, seed=1)
    folder = make_mtp(tmp_path, checkpoint_of("llama"), "deepseek", seed=1, alone=True)
    found: list[Tensor] = []
    for _ in range(2):
        head = load_head(folder, target, shared_of(target), torch.float32, CPU)
        found.append(PagedHead(head).forward(torch.arange(5), hidden))
        config, tensors = read_head(folder)
        second = {name.replace("layers.3.", "layers.4."): tensor * 2 for name, tensor in tensors.items()}
        save_head(folder, config | {"num_nextn_predict_layers": 2}, tensors | second)
    assert torch.equal(*found)


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
Q_PROJ = "model.layers.3.self_attn.q_proj.weight"
WRONG: dict[str, tuple[Change, type[DiptychError], str]] = {
    "hidden size": (
        lambda config, _: config.update(hidden_size=96),
        ConfigError,
        "hidden size of 96, and LlamaForCausalLM has 64",
    ),
    "vocabulary": (
        lambda config, _: config.update(vocab_size=600),
        ConfigError,
        "vocabulary of 600, and LlamaForCausalLM has 500",
    ),
    "layers": (
        lambda config, _: config.update(num_hidden_layers=4),
        ConfigError,
        "target of 4 layers, and LlamaForCausalLM has 3",
    ),
    "no modules": (
        lambda config, _: config.update(num_nextn_predict_layers=0),
        CheckpointError,
        "num_nextn_predict_layers must be an integer in .* found 0",
    ),
    "no module's tensors": (
        lambda _, tensors: tensors.pop("model.layers.3.eh_proj.weight"),
        CheckpointError,
        r"holds no MTP module: model\.layers\.3\.eh_proj\.weight",
    ),
    "no hnorm": (
        lambda _, tensors: tensors.pop("model.layers.3.hnorm.weight"),
        CheckpointError,
        r"tensor hnorm.weight of shape \[64\] is in none",
    ),
    "no o_proj": (
        lambda _, tensors: tensors.pop("model.layers.3.self_attn.o_proj.weight"),
        CheckpointError,
        r"tensor model.layers.0.self_attn.o_proj.weight of shape \[64, 128\] is in none",
    ),
    "eh_proj": (
        lambda _, tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(64, 64)}),
        CheckpointError,
        r"eh_proj.weight must have shape \[64, 128\], found \[64, 64\]",
    ),
    "gated attention": (
        lambda _, tensors: tensors.update({Q_PROJ: torch.cat((tensors[Q_PROJ], tensors[Q_PROJ]))}),
        UnsupportedArchitecture,
        "q_proj.weight has 256 rows where 128 make all queries: gated attention is not supported",
    ),
    "Qwen3-Next": (
        lambda config, _: config.update(architectures=["Qwen3NextForCausalLM"]),
        UnsupportedArchitecture,
        "gated attention of Qwen3NextForCausalLM is not supported",
    ),
    "architecture": (
        lambda config, _: config.update(architectures=["MambaForCausalLM"]),
        UnsupportedArchitecture,
        "MambaForCausalLM is not supported",
    ),
    "a tensor more": (
        lambda _, tensors: tensors.update({"model.layers.3.self_attn.sinks": torch.ones(8)}),
        CheckpointError,
        "model.layers.3.self_attn.sinks is unexpected",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_module_is_refused_by_name(what: str, llama: Path, tmp_path: Path) -> None:
    change, error, message = WRONG[what]
    target = load_spec(llama)
    folder = make_mtp(tmp_path, llama, "deepseek", seed=6, alone=True)
    load_head(folder, target, shared_of(target), torch.float32, CPU)
    config, tensors = read_head(folder)
    change(config, tensors)
    save_head(folder, config, tensors)
    with pytest.raises(error, match=message) as raised:
        load_head(folder, target, shared_of(target), torch.float32, CPU)
    assert str(folder) in str(raised.value)


def test_gated_layers_of_speculators_are_refused_by_name(qwen3: Path, tmp_path: Path) -> None:
    config, tensors = read_head(make_mtp(tmp_path, qwen3, SPECULATORS, seed=1, alone=True))
    config["transformer_layer_config"]["model_type"] = "qwen3_next"
    with pytest.raises(UnsupportedArchitecture, match="gated attention of qwen3_next is not supported"):
        read_head_spec(save_head(tmp_path, config, tensors), load_spec(qwen3))


def test_families_with_more_than_layers_are_refused_by_name(checkpoint_of: CheckpointOf) -> None:
    path = checkpoint_of("gemma2")
    target = load_spec(path)
    with pytest.raises(UnsupportedArchitecture, match="MTP modules of Gemma2ForCausalLM are not supported"):
        read_head_spec(path, target)
