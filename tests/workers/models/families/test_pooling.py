"""How a checkpoint's embeddings are made: read from the files of sentence-transformers, and from its config.json."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.errors import CheckpointError
from diptych.workers.core.embedding import EmbeddingSpec, Pooling
from diptych.workers.models.families.pooling import read_embedding_spec

KINDS = ("Transformer", "Pooling", "Normalize")


def read(
    folder: Path,
    config: dict[str, Any],
    pooling: Any = None,
    kinds: tuple[str, ...] | None = None,
    at: str = "1_Pooling",
) -> EmbeddingSpec:
    (folder / "config.json").write_text(json.dumps(config))
    if pooling is not None:
        (folder / at).mkdir(exist_ok=True)
        (folder / at / "config.json").write_text(json.dumps(pooling))
    if kinds is not None:
        listed = [{"type": f"sentence_transformers.models.{kind}", "path": at * (kind == "Pooling")} for kind in kinds]
        (folder / "modules.json").write_text(json.dumps(listed))
    return read_embedding_spec(folder, 64)


def test_a_plain_decoder_has_its_last_hidden_state(tmp_path: Path) -> None:
    assert read(tmp_path, {}) == EmbeddingSpec(64, Pooling.LAST, normalised=True)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, Pooling.MEAN),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({"pooling_mode": ["mean"]}, Pooling.MEAN),
        ({"word_embedding_dimension": 64}, Pooling.MEAN),
    ],
)
def test_modules_say_how_tokens_are_pooled(tmp_path: Path, pooling: dict[str, Any], expected: Pooling) -> None:
    assert read(tmp_path, {}, pooling) == EmbeddingSpec(64, expected)
    assert read(tmp_path, {}, pooling, KINDS) == EmbeddingSpec(64, expected)
    assert read(tmp_path, {}, pooling, KINDS[:2]) == EmbeddingSpec(64, expected, normalised=False)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    assert read(tmp_path, {}, pooling, KINDS, at="pooled").pooling is expected


@pytest.mark.parametrize(
    ("config", "pooling", "kinds", "why"),
    [
        ({}, {"pooling_mode_cls_token": True}, KINDS, r"another way than lasttoken or mean \(cls\)"),
        ({}, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, KINDS, r"\(max\+mean\)"),
        ({}, {"pooling_mode": ["mean", "lasttoken"]}, None, r"\(mean\+lasttoken\)"),
        ({}, {"pooling_mode_mean_tokens": True, "include_prompt": False}, KINDS, "after a prompt of its own"),
        ({}, {"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense", "Normalize"), "the module Dense"),
        ({"is_causal": False}, None, None, "is_causal in config.json"),
        ({"use_bidirectional_attention": True}, None, None, "attend to later ones"),
    ],
)
def test_what_is_not_computed_refuses_embeddings_by_name(
    tmp_path: Path, config: dict[str, Any], pooling: Any, kinds: tuple[str, ...] | None, why: str
) -> None:
    spec = read(tmp_path, config, pooling, kinds)
    assert re.search(why, spec.refusal), spec.refusal


def test_config_says_whether_embeddings_may_be_cut(tmp_path: Path) -> None:
    assert read(tmp_path, {"is_matryoshka": True}).may_be_cut
    spec = read(tmp_path, {"matryoshka_dimensions": [16, 32]})
    assert (spec.may_be_cut, spec.dimensions) == (True, (16, 32))
    assert not read(tmp_path, {"is_matryoshka": False}).may_be_cut
    for wrong in (16, [0], [65], ["16"], [True], [1] * 65):
        with pytest.raises(CheckpointError, match="matryoshka_dimensions must be a list"):
            read(tmp_path, {"matryoshka_dimensions": wrong})


@pytest.mark.parametrize(
    "written", ["{", "{}", "[1]", '[{"type": "Pooling"}]', '[{"type": "Pooling", "path": "../x"}]']
)
def test_a_damaged_list_of_modules_is_an_error(tmp_path: Path, written: str) -> None:
    (tmp_path / "modules.json").write_text(written)
    with pytest.raises(CheckpointError, match=r"must be a list of modules|outside the checkpoint"):
        read(tmp_path, {})


def test_a_damaged_mode_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="pooling_mode must be"):
        read(tmp_path, {}, {"pooling_mode": [1]})
