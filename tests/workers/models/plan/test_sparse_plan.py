"""Which layers attend sparsely, of families with windows, latent attention and shared KV."""

import pytest

from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.sparse_plan import sparse_layers, why_of

from ...conftest import CheckpointOf


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("llama", {2: 2}),
        ("qwen3moe", {2: 2, 3: 3}),
        ("mistral", {}),  # windows
        ("gemma3", {}),  # its last layer has one
        ("gemma4-moe", {2: 2}),
        ("gemma4", {3: 3}),  # the last two layers read others' KV
        ("deepseek-v2", {}),  # latent attention
    ],
)
def test_all_but_the_first_two_layers(checkpoint_of: CheckpointOf, arch: str, expected: dict[int, int]) -> None:
    spec = load_spec(checkpoint_of(arch))
    assert sparse_layers(spec, 64) == expected and sparse_layers(spec, 0) == {}
    assert why_of(spec, 64).startswith(f"{len(expected)} of {spec.num_layers} layers decode from 64 tokens")
