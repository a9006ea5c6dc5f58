"""Which group of a compressed-tensors config a module is in; and patterns of names, which strangers write."""

from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.errors import CheckpointError
from diptych.workers.models.families import quantisation_fields
from diptych.workers.models.families.compressed_config import CompressedTensors
from diptych.workers.models.families.json_config import JsonFields

Q = "model.layers.0.self_attn.q_proj"


def config(*groups: list[str], ignore: list[str] | None = None) -> CompressedTensors:
    """Groups by their targets; the first has numbers of 1 bit, the next of 2, ..."""
    sections: dict[str, Any] = {
        f"group_{i}": {"targets": targets, "weights": {"num_bits": i + 1}} for i, targets in enumerate(groups)
    }
    fields = {"format": "int-quantized", "config_groups": sections, "ignore": ignore}
    return CompressedTensors.read(JsonFields(Path("config.json"), fields))


def bits_of(of: CompressedTensors, module: str) -> int | None:
    group = of.group_of(module)
    return None if group is None else group.bits


def test_names_come_before_patterns_and_these_before_classes() -> None:
    """And patterns in the order of their texts: as compressed-tensors chooses when it writes."""
    found = config(["Linear"], ["re:.*q_proj", "re:.*k_proj"], [Q], ["re:.*attn.*"])
    assert bits_of(found, Q) == 3
    assert bits_of(found, Q.replace("q_", "k_")) == 4
    assert bits_of(found, Q.replace("0", "1")) == 4
    assert bits_of(found, "model.layers.0.mlp.up_proj") == 1
    assert bits_of(config(["re:.*attn.*"], ["re:.*q_proj"]), Q) == 1


def test_embeddings_are_no_linear_modules() -> None:
    assert bits_of(config(["Linear"]), "model.embed_tokens") is None
    assert bits_of(config(["Linear"], ["Embedding"]), "model.embed_tokens") == 2


def test_what_is_ignored_has_no_group() -> None:
    assert bits_of(config([Q], ignore=["re:.*self_attn"]), Q) is None
    assert bits_of(config(["Linear"], ignore=["self_attn.q_proj"]), Q) == 1  # the whole name


@pytest.mark.parametrize("where", ["targets", "ignore"])
def test_a_pattern_may_not_take_for_ever(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one goes through all ways to cut a name in eight."""
    monkeypatch.setattr(quantisation_fields, "MAX_PATTERN_S", 0.05)
    hostile = [r"re:(.*).*.*.*.*.*.*.*\1[A-Z]"]
    found = config(hostile) if where == "targets" else config(["Linear"], ignore=hostile)
    with pytest.raises(
        CheckpointError, match=rf"config.json: .*{where} must take less than 0.05 s for all names: write"
    ):
        for module in ("a", Q * 4):
            found.group_of(module)


def test_time_is_of_all_names_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name takes a little; none too much."""
    monkeypatch.setattr(quantisation_fields, "MAX_PATTERN_S", 0.2)
    found = config([r"re:(a|aa|[a-z])*[A-Z]"])
    with pytest.raises(CheckpointError, match=r"targets must take less than 0\.2 s"):
        for _ in range(1_000_000):
            found.group_of("abcaabcaabcaabca")


def test_a_config_is_named_by_its_texts_alone() -> None:
    """Its representation is part of the weights' name, which many processes must make alike."""
    one, other = (repr(config(["re:.*q_proj", "Linear"], ignore=["lm_head"])) for _ in range(2))
    assert one == other and "0x" not in one
