"""Tests of benchmarks/common/roofline.py: what it says that a step must read and multiply, against the checkpoint
itself."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks.common import roofline
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import MlpSpec, MoeSpec, RoutingSpec

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"


def test_the_weights_are_the_checkpoints_matrices() -> None:
    matrices = 0
    with safe_open(TINY / "model.safetensors", "np") as file:
        for name in sorted(file.keys()):
            shape = file.get_slice(name).get_shape()
            matrices += math.prod(shape) if len(shape) == 2 else 0
    spec = load_spec(TINY)
    cost = roofline.ModelCost(spec)
    counted = cost.num_layer_weights + cost.num_head_weights
    assert matrices == counted if spec.tie_word_embeddings else matrices == counted + cost.num_head_weights


def test_a_decode_reads_weights_once_and_kv_for_each_sequence() -> None:
    cost = roofline.ModelCost(load_spec(TINY))
    spec = cost.spec
    kv_bytes = 2 * 2 * spec.num_layers * spec.kv.num_heads * spec.kv.dim * 100
    assert cost.decode_bytes(7, 100) - cost.decode_bytes(0, 100) == 7 * kv_bytes
    assert roofline.ModelCost(spec, 4).decode_bytes(7, 100) == 2 * cost.decode_bytes(7, 100)


def test_a_prefill_is_the_decodes_of_its_tokens_but_for_their_logits() -> None:
    """Causal attention of n tokens is n decodes at a mean context of n / 2."""
    cost = roofline.ModelCost(load_spec(TINY))
    decodes = cost.decode_flops(64, 32)
    assert cost.prefill_flops(64) == decodes - 63 * 2 * cost.num_head_weights


def test_a_mixture_reads_the_experts_that_a_batch_touches() -> None:
    spec = load_spec(TINY)
    mixture = MoeSpec(8, MlpSpec(24), RoutingSpec(2), MlpSpec(40))
    cost = roofline.ModelCost(replace(spec, layers=(replace(spec.layers[0], feed_forward=mixture),)))
    one, all_of_them, hidden = cost.num_touched(1), cost.num_touched(1000), spec.hidden_size
    assert all_of_them - one == pytest.approx(6 * 3 * 24 * hidden)
    assert cost.num_layer_weights == round(one)
    assert cost.decode_bytes(1000, 0) - cost.decode_bytes(1, 0) == 2 * round(all_of_them - one)


def test_a_share_is_of_the_limit_that_binds() -> None:
    cost = roofline.ModelCost(load_spec(TINY))
    limits = roofline.Roofline(threads=1, read_bytes_s=1e9, l1_flops=2e9, matrix_flops=1e9)
    read_s, multiply_s = cost.decode_bytes(1, 10) / 1e9, cost.decode_flops(1, 10) / 2e9
    assert cost.decode_share(limits, 1, 10, 2 * max(read_s, multiply_s)) == pytest.approx(0.5)
    slow = replace(limits, l1_flops=1e6, matrix_flops=1e6)
    assert cost.decode_share(slow, 1, 10, cost.decode_flops(1, 10) / 1e6) == pytest.approx(1.0)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_measured_is_not_nothing(threads: int) -> None:
    limits = roofline.measure(threads, seconds=0.03)
    assert limits.read_bytes_s > 0 and limits.matrix_flops > 0 and limits.flops >= limits.matrix_flops
