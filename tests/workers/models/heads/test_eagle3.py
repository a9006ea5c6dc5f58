"""EAGLE-3 heads of both published formats compute what their formats say, and wrong ones are refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.workers.common.errors import CheckpointError, ConfigError, DiptychError, UnsupportedArchitecture
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import ModelSpec
from diptych.workers.models.head_specs.eagle3_tensors import MAPS, eagle3_name
from diptych.workers.models.head_specs.head_config import read_head_spec
from diptych.workers.models.head_specs.head_spec import HiddenState
from diptych.workers.models.heads.draft_head import DraftHead, SharedWeights
from diptych.workers.models.heads.head_files import HeadFiles
from diptych.workers.models.heads.loading import load_head

from ....support.heads import SPECFORGE, SPECULATORS, eagle3_config, make_eagle3, read_head, save_head
from ....support.paged_head import CPU, PagedHead
from .twins import PlainEagle3

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
QWEN3 = {"model_type": "qwen3", "attention_bias": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before residual": {"norm_before_residual": True},
    "one norm before fc": {"norm_before_fc": True},
    "norms before fc": {"fc_norm": True},
    "norm fed back": {"norm_output": True},
    "bias": {"layer": {"attention_bias": True}},
    "smaller than its target": {"layer": {"hidden_size": 48}, "target_hidden_size": 64},
}
SPECULATORS_ALONE: dict[str, dict[str, Any]] = {
    "qwen3": {"layer": QWEN3},
    "three layers": {"layer": QWEN3 | {"num_hidden_layers": 3}, "norm_before_residual": True},
}
CASES = [(form, kind, fields) for form in (SPECFORGE, SPECULATORS) for kind, fields in KINDS.items()]
CASES += [(SPECULATORS, kind, fields) for kind, fields in SPECULATORS_ALONE.items()]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def target(llama: Path) -> ModelSpec:
    return load_spec(llama)


def shared_of(target: ModelSpec) -> SharedWeights:
    shape = (target.vocab_size, target.hidden_size)
    return SharedWeights(normal(*shape, seed=8), normal(*shape, seed=9) / 8)


def loaded(folder: Path, target: ModelSpec) -> DraftHead:
    return load_head(folder, target, shared_of(target), torch.float32, CPU)


def both(folder: Path, target: ModelSpec) -> tuple[PagedHead, PlainEagle3]:
    config, tensors = read_head(folder)
    return PagedHead(loaded(folder, target)), PlainEagle3(config, tensors, shared_of(target).embed)


def assert_equal(paged: PagedHead, plain: PlainEagle3, token_ids: Tensor, hidden: Tensor) -> Tensor:
    """Compare what both make of the next entries; return the hidden states that are fed back."""
    before = hidden.clone()
    found, expected = paged.forward(token_ids, hidden), plain.forward(token_ids, hidden)
    torch.testing.assert_close(hidden, before, rtol=0, atol=0)  # what is given is not overwritten
    torch.testing.assert_close(found, expected, **TOLERANCE)
    torch.testing.assert_close(paged.head.logits(found), plain.logits(expected), **TOLERANCE)
    return found


@pytest.mark.parametrize(("form", "kind", "fields"), CASES, ids=lambda of: None if isinstance(of, dict) else of)
def test_a_chunk_and_steps_that_are_fed_back_equal_the_plain_computation(
    form: str, kind: str, fields: dict[str, Any], target: ModelSpec, tmp_path: Path
) -> None:
    own_embed = kind != "plain" or form == SPECULATORS
    folder = make_eagle3(tmp_path, eagle3_config(form, **fields), seed=len(kind), own_embed=own_embed)
    paged, plain = both(folder, target)
    aux, token_ids = normal(37, 3 * 64, seed=1) * 3, torch.arange(37) * 13 % 500
    entered = paged.head.enter(aux)
    torch.testing.assert_close(entered, plain.enter(aux), **TOLERANCE)
    last = assert_equal(paged, plain, token_ids[:20], entered[:20])
    for t in range(20, 24):  # token by token, of the target's hidden states
        last = assert_equal(paged, plain, token_ids[t : t + 1], entered[t : t + 1])
    for t in range(24, 28):  # of those that the head itself returned
        last = assert_equal(paged, plain, token_ids[t : t + 1], last[-1:])
    paged.num_entries = 24  # drafts are written over
    for layer in plain.layers:
        del layer.keys[24:], layer.values[24:]
    assert_equal(paged, plain, token_ids[24:37], entered[24:37])


def test_the_draft_vocabulary_is_a_part_of_the_targets(target: ModelSpec, tmp_path: Path) -> None:
    folder = make_eagle3(tmp_path, eagle3_config(SPECFORGE), seed=3)
    _, tensors = read_head(folder)
    found = loaded(folder, target).to_target(torch.arange(120))
    assert found.tolist() == tensors["t2d"].nonzero()[:, 0].tolist() and len(found) == 120


def test_the_same_vocabulary_needs_no_map(target: ModelSpec, tmp_path: Path) -> None:
    folder = make_eagle3(tmp_path, eagle3_config(SPECULATORS, draft_vocab_size=500), seed=3)
    config, tensors = read_head(folder)
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    head = loaded(save_head(folder, config, tensors), target)
    assert head.to_target(torch.tensor([0, 499])).tolist() == [0, 499]
    hidden = normal(2, 64, seed=2)
    final = PlainEagle3(config, tensors, shared_of(target).embed).final(hidden)
    torch.testing.assert_close(head.logits(hidden), final @ shared_of(target).lm_head.T, **TOLERANCE)


def test_layers_are_those_of_the_pool_from_the_first_on(target: ModelSpec, tmp_path: Path) -> None:
    """Entries of a head whose layers are after the target's change nothing in these."""
    folder = make_eagle3(tmp_path, eagle3_config(SPECULATORS), seed=4)
    head = load_head(folder, target, shared_of(target), torch.float32, CPU, first_kv_layer=3)
    paged, alone = PagedHead(head, num_layers_before=3), PagedHead(loaded(folder, target))
    hidden, token_ids = normal(20, 64, seed=5), torch.arange(20)
    torch.testing.assert_close(paged.forward(token_ids, hidden), alone.forward(token_ids, hidden), rtol=0, atol=0)
    assert all(paged.cache.layer(i).isnan().all() for i in range(3)) and not paged.cache.layer(3)[3].isnan().any()


@pytest.mark.parametrize(
    ("num_layers", "change", "layers"),
    [
        (32, {}, (2, 16, 29)),
        (32, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),
        (32, {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, (1, 15, 28)),
        (5, {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}, (0, 3, 5)),
        (5, {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, None),
        (5, {"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}, None),
        (5, {"eagle_aux_hidden_state_layer_ids": [-1, 1, 3]}, None),
        (5, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, None),
        (5, {}, None),
    ],
)
def test_hidden_states_are_taken_after_the_layers_that_are_named(
    num_layers: int, change: dict[str, Any], layers: tuple[int, ...] | None, target: ModelSpec, tmp_path: Path
) -> None:
    target = replace(target, layers=target.layers[:1] * num_layers)
    config = eagle3_config(SPECFORGE)
    del config["eagle_config"]
    save_head(tmp_path, config | change, {"fc.weight": torch.zeros(1)})
    if layers is None:
        with pytest.raises(ConfigError, match=r"eagle_aux_hidden_state_layer_ids must .* layers|eagle_aux.* to \d"):
            read_head_spec(tmp_path, target)
        return
    spec = read_head_spec(tmp_path, target)
    assert (spec.hidden_layers, spec.takes, spec.aux_size) == (layers, HiddenState.AFTER_LAYERS, 192)


def test_fields_of_a_head(target: ModelSpec, tmp_path: Path) -> None:
    layer = {"hidden_size": 48, "num_hidden_layers": 2, "rope_theta": 5e5}
    folder = make_eagle3(tmp_path, eagle3_config(SPECULATORS, layer=layer, target_hidden_size=64), seed=1)
    spec = read_head_spec(folder, target)
    assert (spec.method, spec.draft_vocab_size, spec.target_hidden_size) == ("eagle3", 120, 64)
    assert (spec.kv.num_layers, spec.kv.num_heads, spec.kv.dim, spec.decoder.hidden_size) == (2, 2, 16, 48)
    assert [rope.theta for rope, _ in spec.decoder.ropes] == [5e5]


def test_the_bytes_of_a_head_are_those_of_its_weights(target: ModelSpec, tmp_path: Path) -> None:
    folder = make_eagle3(tmp_path, eagle3_config(SPECFORGE), seed=1)
    _, tensors = read_head(folder)
    with HeadFiles(folder, read_head_spec(folder, target).decoder, eagle3_name, MAPS) as files:
        assert files.num_bytes == 4 * sum(tensor.numel() for name, tensor in tensors.items() if name not in MAPS)


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
WRONG: dict[str, tuple[Change, type[DiptychError], str]] = {
    "hidden size": (
        lambda config, _: config.update(target_hidden_size=96),
        ConfigError,
        "hidden size of 96, and LlamaForCausalLM has 64",
    ),
    "vocabulary": (
        lambda config, _: config.update(vocab_size=600),
        ConfigError,
        "vocabulary of 600, and LlamaForCausalLM has 500",
    ),
    "draft vocabulary": (
        lambda config, _: config.update(draft_vocab_size=501),
        CheckpointError,
        "draft_vocab_size must be at most vocab_size=500, found 501",
    ),
    "lm_head": (
        lambda config, _: config.update(draft_vocab_size=119),
        CheckpointError,
        r"lm_head.weight must have shape \[119, 64\], found \[120, 64\]",
    ),
    "d2t of another size": (
        lambda _, tensors: tensors.update(d2t=tensors["d2t"][:-1].clone()),
        CheckpointError,
        r"tensor d2t must be 120 integers .* found I64 of shape \[119\]",
    ),
    "t2d of another size": (
        lambda _, tensors: tensors.update(t2d=tensors["t2d"][:-1].clone()),
        CheckpointError,
        r"tensor t2d must be 500 integers .* found BOOL of shape \[499\]",
    ),
    "d2t of another dtype": (
        lambda _, tensors: tensors.update(d2t=tensors["d2t"].float()),
        CheckpointError,
        "tensor d2t must be 120 integers .* found F32",
    ),
    "d2t beyond the vocabulary": (
        lambda _, tensors: tensors["d2t"].__setitem__(7, 493),
        CheckpointError,
        "d2t must lead to ids below the target's vocabulary of 500, found 500 for draft id 7",
    ),
    "d2t below 0": (
        lambda _, tensors: tensors["d2t"].__setitem__(7, -8),
        CheckpointError,
        "found -1 for draft id 7",
    ),
    "d2t twice the same": (
        lambda _, tensors: tensors["d2t"].__setitem__(slice(0, 2), torch.tensor([5, 4])),
        CheckpointError,
        "d2t must lead to distinct ids, found 119 of 120",
    ),
    "t2d of other ids": (
        lambda _, tensors: tensors.update(t2d=tensors["t2d"].logical_not()),
        CheckpointError,
        "t2d must name the 120 ids that d2t leads to, found 380, 500 of them",
    ),
    "no d2t": (
        lambda _, tensors: tensors.pop("d2t"),
        CheckpointError,
        "d2t is missing: the draft vocabulary has 120 tokens and the target's 500",
    ),
    "no lm_head": (
        lambda _, tensors: tensors.pop("lm_head.weight"),
        ConfigError,
        r"no lm_head.weight of shape \[120, 64\], and the target's has \[500, 64\]",
    ),
    "no hidden_norm": (
        lambda _, tensors: tensors.pop("midlayer.hidden_norm.weight"),
        CheckpointError,
        r"tensor model.layers.0.hidden_norm.weight of shape \[64\] is in none",
    ),
    "fc of one hidden state": (
        lambda _, tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :64].clone()}),
        CheckpointError,
        r"fc.weight must have shape \[64, 192\], found \[64, 64\]",
    ),
    "projections of a plain layer": (
        lambda _, tensors: tensors.update(
            {"midlayer.self_attn.k_proj.weight": tensors["midlayer.self_attn.k_proj.weight"][:, :64].clone()}
        ),
        CheckpointError,
        r"k_proj.weight must have shape \[32, 128\], found \[32, 64\]",
    ),
    "a tensor more": (
        lambda _, tensors: tensors.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}),
        CheckpointError,
        "midlayer.self_attn.q_norm.weight is unexpected",
    ),
    "a tensor twice": (
        lambda _, tensors: tensors.update({"layers.0.hidden_norm.weight": torch.ones(64)}),
        CheckpointError,
        "keep one of them",
    ),
    "architecture": (
        lambda config, _: config.update(architectures=["LlamaForCausalLMEagle"]),
        UnsupportedArchitecture,
        "LlamaForCausalLMEagle'",
    ),
    "EAGLE-1": (
        lambda config, _: config.update(eagle_config={"use_aux_hidden_state": False}),
        CheckpointError,
        "eagle_config.use_aux_hidden_state must be true",
    ),
    "both norms": (
        lambda config, _: config.update(fc_norm=True, norm_before_fc=True),
        CheckpointError,
        "fc_norm must be false where norm_before_fc is true",
    ),
    "rope": (
        lambda config, _: config.update(rope_scaling={"rope_type": "mrope", "mrope_section": [2, 3, 3]}),
        CheckpointError,
        "rope_type must be one of .* found 'mrope'",
    ),
    "quantised": (
        lambda config, _: config.update(quantization_config={"quant_method": "hqq"}),
        CheckpointError,
        "quant_method must be one of compressed-tensors, gptq",
    ),
    "parallel drafting": (
        lambda config, _: config.update(parallel_drafting=True),
        CheckpointError,
        "parallel_drafting must be false",
    ),
    "logit_scale": (lambda config, _: config.update(logit_scale=0.5), CheckpointError, "logit_scale must be 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_head_is_refused_by_name(what: str, target: ModelSpec, tmp_path: Path) -> None:
    change, error, message = WRONG[what]
    folder = make_eagle3(tmp_path, eagle3_config(SPECFORGE), seed=6)
    config, tensors = read_head(folder)
    loaded(folder, target)
    change(config, tensors)
    save_head(folder, config, tensors)
    with pytest.raises(error, match=message) as raised:
        loaded(folder, target)
    assert str(folder) in str(raised.value)


def test_a_head_of_another_size_needs_its_own_embeddings(target: ModelSpec, tmp_path: Path) -> None:
    config = eagle3_config(SPECFORGE, layer={"hidden_size": 48}, target_hidden_size=64)
    folder = make_eagle3(tmp_path, config, seed=6, own_embed=False)
    with pytest.raises(ConfigError, match=r"hidden size of 48 differs from the target's 64"):
        loaded(folder, target)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"speculators_model_type": "dflash"}, UnsupportedArchitecture, "speculators_model_type 'dflash'"),
        ({"transformer_layer_config": None}, CheckpointError, "transformer_layer_config must be an object"),
        ({"transformer_layer_config": {"model_type": "mamba"}}, UnsupportedArchitecture, "model_type 'mamba'"),
    ],
)
def test_a_wrong_config_of_speculators_is_refused_by_name(
    change: dict[str, Any], error: type[DiptychError], message: str, target: ModelSpec, tmp_path: Path
) -> None:
    folder = save_head(tmp_path, eagle3_config(SPECULATORS) | change, {"fc.weight": torch.zeros(1)})
    with pytest.raises(error, match=message):
        read_head_spec(folder, target)


def test_a_folder_without_a_config_is_named(target: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        read_head_spec(tmp_path, target)
