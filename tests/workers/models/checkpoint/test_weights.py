"""Checkpoints: every tensor accounted for, whatever is wrong named, nothing read before all is checked."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.kernels.cpu.formats import Format
from diptych.workers.common.errors import CheckpointError
from diptych.workers.models.checkpoint.weights import Checkpoint, DecoderWeights, LayerWeights
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.sharding import Share, shape_of_part
from diptych.workers.models.plan.tensor_names import EMBED, HEAD, Cut, Piece, expected_tensors, own_name
from diptych.workers.models.plan.weight_bytes import weight_bytes
from diptych.workers.models.rounding.stored import as_stored_

from ....support.checkpoints import ARCHITECTURES, make_checkpoint, reference_model
from ...conftest import CheckpointOf

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def read(path: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    with Checkpoint(path, load_spec(path)) as checkpoint:
        return checkpoint.load(dtype, CPU)


def fingerprint(path: Path) -> str:
    with Checkpoint(path, load_spec(path)) as checkpoint:
        return checkpoint.fingerprint()


def edited(source: Path, target: Path, edit: Callable[[Tensors], object]) -> Path:
    """A copy of a single-file checkpoint whose tensors `edit` has changed in place."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("sharded") / "llama", "llama", 1, max_shard_size="300KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture
def broken(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "broken"))


def test_reads_and_fuses_every_tensor(qwen3: Path) -> None:
    stored, weights = load_file(qwen3 / "model.safetensors"), read(qwen3)
    assert torch.equal(weights.embed, stored["model.embed_tokens.weight"])
    assert torch.equal(weights.lm_head, stored["lm_head.weight"])
    for i, layer in enumerate(weights.layers):
        name = f"model.layers.{i}."
        parts = [stored[f"{name}self_attn.{x}_proj.weight"] for x in "qkv"]
        assert torch.equal(layer.qkv, torch.cat(parts))
        parts = [stored[f"{name}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        assert torch.equal(layer.gate_up, torch.cat(parts))
        assert layer.q_norm is not None
        assert torch.equal(layer.q_norm, stored[f"{name}self_attn.q_norm.weight"])
        assert layer.qkv_bias is None


def test_converts_and_reports_progress(llama: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Checkpoint(llama, load_spec(llama)) as checkpoint:
        weights = checkpoint.load(torch.bfloat16, CPU, lambda done, total: seen.append((done, total)))
    stored = load_file(llama / "model.safetensors")
    assert torch.equal(weights.layers[0].down, stored["model.layers.0.mlp.down_proj.weight"].bfloat16())
    total = sum(t.numel() * t.element_size() for t in stored.values())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_tied_embeddings_share_one_tensor(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", 3, tie_word_embeddings=True)
    weights = read(path)
    assert weights.lm_head is weights.embed


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "tied", "llama", 3, tie_word_embeddings=True)


def test_a_head_that_is_stored_with_the_embeddings_it_is_tied_to_is_dropped(tied: Path, tmp_path: Path) -> None:
    path = edited(tied, tmp_path / "both", lambda t: t.update({HEAD: t[EMBED].clone()}))
    weights = read(path)
    assert weights.lm_head is weights.embed
    assert fingerprint(path) == fingerprint(tied)
    with Checkpoint(path, load_spec(path)) as checkpoint:
        assert checkpoint.num_bytes == sum(t.nbytes for t in load_file(tied / "model.safetensors").values())


def test_a_head_that_differs_from_what_it_is_tied_to_is_used_and_counted(
    tied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ in the last number, after the part that is compared at once; transformers uses it too."""
    monkeypatch.setattr("diptych.workers.models.plan.shards.CHUNK_BYTES", 1000)
    head = {HEAD: load_file(tied / "model.safetensors")[EMBED].clone()}
    head[HEAD][-1, -1] += 1
    path = edited(tied, tmp_path / "differs", lambda t: t.update(head))
    with Checkpoint(path, load_spec(path)) as checkpoint:
        weights, spec = checkpoint.load(torch.float32, CPU), checkpoint.spec
    assert torch.equal(weights.lm_head, head[HEAD])
    assert torch.equal(weights.lm_head, reference_model(path).lm_head.weight)
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text
    assert weight_bytes(spec, Share(), "float32")["lm_head"] == weights.lm_head.nbytes


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_head_that_is_quantised_is_tied_to_nothing(tied: Path, quantize: str) -> None:
    spec = load_spec(tied)
    with Checkpoint(tied, spec) as checkpoint:
        weights = checkpoint.load(torch.float32, CPU, quantize=quantize)
    assert torch.equal(weights.embed, load_file(tied / "model.safetensors")[EMBED])
    assert torch.equal(weights.lm_head, as_stored_(weights.embed.clone(), Format.INT8))
    assert not torch.equal(weights.lm_head, weights.embed)
    planned = weight_bytes(spec, Share(), "float32", quantize)
    assert (planned["embed"], planned["lm_head"]) == (weights.embed.nbytes, (spec.hidden_size + 4) * spec.vocab_size)


def test_a_tied_checkpoint_may_hold_the_head_alone(tied: Path, tmp_path: Path) -> None:
    path = edited(tied, tmp_path / "head", lambda t: t.update({HEAD: t.pop(EMBED)}))
    weights = read(path)
    assert weights.lm_head is weights.embed
    assert torch.equal(weights.embed, read(tied).embed)
    assert fingerprint(path) == fingerprint(tied)


def test_sharding_changes_neither_weights_nor_fingerprint(llama: Path, sharded: Path) -> None:
    one, many = read(llama), read(sharded)
    assert all(torch.equal(a.qkv, b.qkv) for a, b in zip(one.layers, many.layers, strict=True))
    assert fingerprint(llama) == fingerprint(sharded)


def test_fingerprints_differ_with_weights_and_config(llama: Path, qwen3: Path, tmp_path: Path) -> None:
    def nudge(tensors: Tensors) -> None:
        tensors["model.norm.weight"][0] += 1e-3

    changed = edited(llama, tmp_path / "weights", nudge)
    reconfigured = edited(llama, tmp_path / "config", lambda _: None)
    config = json.loads((llama / "config.json").read_text())
    (reconfigured / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    names = [fingerprint(path) for path in (llama, qwen3, changed, reconfigured)]
    assert len(set(names)) == 4
    assert all(len(name) == 32 for name in names)


def test_rotary_buffers_of_old_checkpoints_are_ignored(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = edited(llama, tmp_path / "copy", lambda t: t.update({name: torch.ones(8)}))
    assert fingerprint(path) == fingerprint(llama)


def test_layers_that_predict_more_tokens_are_ignored_and_no_others(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    whole = checkpoint_of("deepseek-v3")
    beyond = {
        "model.layers.3.embed_tokens.weight": torch.ones(2),
        "model.layers.3.self_attn.q_a_proj.weight": torch.ones(3),
    }
    predicts = beyond | {"model.layers.3.eh_proj.weight": torch.ones(4)}
    path = edited(whole, tmp_path / "predicts", lambda t: t.update(predicts))
    assert fingerprint(path) == fingerprint(whole)
    path = edited(whole, tmp_path / "more", lambda t: t.update(beyond))
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.embed_tokens\.weight is unexpected"):
        fingerprint(path)


def test_modules_that_predict_more_tokens_are_ignored_and_no_others(llama: Path, tmp_path: Path) -> None:
    module = {"mtp.fc.weight": torch.ones(2), "mtp.layers.0.input_layernorm.weight": torch.ones(3)}
    path = edited(llama, tmp_path / "predicts", lambda t: t.update(module))
    assert fingerprint(path) == fingerprint(llama)
    path = edited(path, tmp_path / "more", lambda t: t.pop("mtp.fc.weight"))
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.0\.input_layernorm\.weight is unexpected"):
        fingerprint(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"tensor model\.norm\.weight of shape \[64\] is in none"),
        (lambda t: t.pop("lm_head.weight"), r"tensor lm_head\.weight of shape \[500, 64\] is in none"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(65)}),
            r"model\.safetensors: tensor model\.norm\.weight must have shape \[64\], found \[65\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            r"model\.safetensors: tensor model\.norm\.weight must have dtype BF16, F16, F32, found I8",
        ),
        (lambda t: t.update({"extra": torch.ones(1)}), r"model\.safetensors: tensor extra is unexpected"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(1)}), r"layers\.3.* is unexpected"),
    ],
)
def test_wrong_tensors_are_named(llama: Path, tmp_path: Path, edit: Callable[[Tensors], object], message: str) -> None:
    path = edited(llama, tmp_path / "copy", edit)
    with pytest.raises(CheckpointError, match=message):
        read(path)


def test_missing_files_are_named(broken: Path) -> None:
    gone = sorted(broken.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"{gone.name} does not exist, and model.safetensors.index.json names it"):
        read(broken)
    (broken / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist, and there is no"):
        read(broken)


def test_damaged_files_are_named(broken: Path) -> None:
    shard = sorted(broken.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    for damaged in (whole[:-100], whole[:4], b"", b"\xff" * 64):
        shard.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{shard.name} is not a complete safetensors file"):
            read(broken)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}']
)
def test_a_damaged_index_is_named(broken: Path, index: str) -> None:
    (broken / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        read(broken)


def test_an_index_that_disagrees_with_its_shards(broken: Path) -> None:
    path = broken / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    name = next(n for n, shard in index["weight_map"].items() if shard == shards[0])
    index["weight_map"][name] = shards[1]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{shards[1]}: tensor {name} is missing"):
        read(broken)


def test_a_tensor_in_two_shards(broken: Path) -> None:
    first, second = sorted(broken.glob("*.safetensors"))[:2]
    tensors = load_file(first)
    save_file(load_file(second) | dict([next(iter(tensors.items()))]), second)
    with pytest.raises(CheckpointError, match=f"{second.name}: tensor .* is also in {first.name}"):
        read(broken)


@pytest.mark.parametrize(
    ("arch", "changes"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {"attention_bias": True})]
    + [(arch, {}) for arch in ARCHITECTURES],
)
def test_expected_tensors_are_those_that_transformers_saves(
    tmp_path: Path, arch: str, changes: dict[str, bool]
) -> None:
    path = make_checkpoint(tmp_path / arch, arch, 4, **changes)
    spec, stored = load_spec(path), load_file(path / "model.safetensors")
    saved = {name: tuple(t.shape) for of, t in stored.items() if (name := own_name(spec, of)) is not None}
    assert expected_tensors(spec) == saved


def test_parts_that_are_not_served_are_left_out_by_name(tmp_path: Path) -> None:
    """Those of vision; anything else that is not expected is an error. Newer names are the same tensors."""
    path = make_checkpoint(tmp_path / "gemma3", "gemma3-vision", 4)
    stored = load_file(path / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in stored)
    with Checkpoint(path, load_spec(path)) as checkpoint:
        assert checkpoint.num_bytes == sum(t.nbytes for n, t in stored.items() if n.startswith("language_model."))
        named = checkpoint.fingerprint()
    newer = {name.replace("language_model.model.", "model.language_model."): t for name, t in stored.items()}
    save_file(newer, path / "model.safetensors")
    assert fingerprint(path) == named
    save_file(newer | {"audio_tower.weight": torch.ones(1)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor audio_tower\.weight is unexpected"):
        read(path)
    norm = "language_model.model.norm.weight"
    save_file(newer | {norm: stored[norm].clone()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.* keep one of them"):
        read(path)


def test_what_norms_are_stored_without_is_added(checkpoint_of: CheckpointOf) -> None:
    path = checkpoint_of("gemma3")
    stored, weights = load_file(path / "model.safetensors"), read(path, torch.bfloat16)
    assert torch.equal(weights.norm, stored["model.norm.weight"] + 1.0)  # float32: 1 + w is not rounded
    q_norm = weights.layers[0].q_norm
    assert q_norm is not None
    assert torch.equal(q_norm, stored["model.layers.0.self_attn.q_norm.weight"] + 1.0)


@pytest.mark.parametrize(("arch", "is_wide"), [("gemma2", True), ("olmo2", True), ("gptoss", True), ("llama", False)])
def test_norms_are_as_wide_as_transformers_computes(checkpoint_of: CheckpointOf, arch: str, is_wide: bool) -> None:
    weights = read(checkpoint_of(arch), torch.bfloat16)
    norms = [weights.norm, *(getattr(weights.layers[0], name) for name in LayerWeights.__slots__ if "norm" in name)]
    assert {norm.dtype for norm in norms if norm is not None} == {torch.float32 if is_wide else torch.bfloat16}


def test_progress_counts_what_is_read(checkpoint_of: CheckpointOf) -> None:
    for arch in ("gemma3", "phi3"):
        seen: list[tuple[int, int]] = []
        path = checkpoint_of(arch)
        with Checkpoint(path, load_spec(path)) as checkpoint:
            checkpoint.load(torch.bfloat16, CPU, lambda done, total, seen=seen: seen.append((done, total)))
        assert seen[-1][0] == seen[-1][1] == max(done for done, _ in seen)


def test_a_piece_is_read_as_it_says(llama: Path) -> None:
    """Part of a tensor, turned, cut for a rank, the rows of its heads in another order, with an offset."""
    name, columns = "model.layers.0.self_attn.q_proj.weight", slice(1, None, 2)
    stored = load_file(llama / "model.safetensors")[name]
    turned = Piece(name, (128, 64), Cut.HEADS, at=(slice(16, 48), columns), transposed=True, order=(0, 2, 1, 3))
    inner = Piece(name, (128, 64), Cut.INNER_INPUTS, at=(slice(16, 48), columns), offset=1.0)
    row = Piece(name, (128, 64), Cut.INNER, at=(3, columns))
    part = stored[16:48, columns]
    with Checkpoint(llama, load_spec(llama)) as checkpoint:
        for rank in range(2):
            share = Share(rank, 2)
            halves = checkpoint.read(turned, share), checkpoint.read(inner, share), checkpoint.read(row, share)
            heads = part.T[share.part_of(32)].view(4, 4, 32)[:, [0, 2, 1, 3]]
            assert torch.equal(halves[0], heads.reshape(16, 32))
            assert torch.equal(halves[1], part[:, share.part_of(32)] + 1.0)
            assert torch.equal(halves[2], stored[3, columns][share.part_of(32)])
            assert [shape_of_part(p, share) for p in (turned, inner, row)] == [tuple(h.shape) for h in halves]


def test_parts_stay_in_the_file_or_take_the_memory_of_those_before(llama: Path) -> None:
    """Columns of a rank are not copied; converted weights are, but not on the heap."""
    share = Share(1, 2)
    with Checkpoint(llama, load_spec(llama)) as checkpoint:
        whole = checkpoint.load(torch.float32, CPU, share=share)
        cut, narrow = (checkpoint.reader(dtype, CPU, share=share) for dtype in (torch.float32, torch.bfloat16))
        for fields, layer in zip(cut.layers(), whole.layers, strict=True):
            [down] = fields.parts("down")
            assert down.stride() == (160, 1)
            assert layer.down is not None and torch.equal(down, layer.down)
        places: set[int] = set()
        for fields, layer in zip(narrow.layers(), whole.layers, strict=True):
            gate, up = fields.parts("gate_up")
            assert gate.is_contiguous() and gate.data_ptr() != up.data_ptr()
            assert layer.gate_up is not None
            assert torch.equal(torch.cat([gate, up]), layer.gate_up.bfloat16())
            [down] = fields.parts("down")
            places.add(down.data_ptr())
        assert len(places) == 1


def test_pages_that_were_read_are_let_go(tmp_path: Path) -> None:
    """An embedding of 4 MB from a file that is mapped after it was read, and unmapped after its release."""
    path = make_checkpoint(tmp_path / "llama", "llama", 1, vocab_size=16_000)
    piece = Piece("model.embed_tokens.weight", (16_000, 64), Cut.VOCABULARY)

    def mapped_bytes() -> int:
        maps = psutil.Process().memory_maps(grouped=False)
        return sum(m.rss for m in maps if m.path == str(path / "model.safetensors"))

    with Checkpoint(path, load_spec(path)) as checkpoint:
        whole = checkpoint.read(piece, Share())
        assert whole.sum().isfinite()
        assert mapped_bytes() >= whole.nbytes
        kept = whole[8007].clone()
        del whole
        checkpoint.let_go()
        assert mapped_bytes() < 1 << 20
        assert torch.equal(checkpoint.read(piece, Share(1, 2))[7], kept)
    assert mapped_bytes() == 0
