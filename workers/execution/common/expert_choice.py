"""Choice of the kernel for experts with many tokens on Hopper: kernels/moe/hopper_experts.py, or the plain one.

Asked for by DIPTYCH_UNTRIED_KERNELS alone. Each kind of product is timed with a layer's own weights and random rows;
the layers keep what was chosen for their two products.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ....kernels.common.untried import is_wanted
from ....kernels.moe import hopper_experts
from ....kernels.moe.grouped_gemm import block_m_of, grouped_product
from ....kernels.moe.moe_sort import moe_sort
from ...device.device import Lane
from ...models.families.spec import MoeSpec
from ...models.layers.decoder import Decoder
from ...models.layers.layer import Layer
from ...models.layers.mlp import ACTIVATIONS
from .timed_choice import MOST_TOKENS, Contest, Work, fastest, made_on, timed_on

NUM_CALLS = 4  # of a run

log = logging.getLogger("diptych.worker")


class Gluon:
    """The language that the other kernel is written in."""

    name = "Gluon"


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """One of a model's products, as far as the kernel's time and its code depend on it."""

    shape: torch.Size  # of the weight, [E, N, K]
    top_k: int
    gate: int | None  # of gate_mul.py; None: the second product


def choose_expert_kernels(lane: Lane, decoder: Decoder, max_tokens: int) -> None:
    """Choose for each kind of product of the decoder's mixtures. max_tokens: of a step."""
    if not is_wanted("hopper-experts"):
        return
    chosen = dict[ExpertProduct, bool]()
    for i, layer in enumerate(decoder.layers):
        both = [False, False]
        for product, weight in _products(layer):
            if product not in chosen:
                chosen[product] = _is_faster(lane, product, weight, min(max_tokens, MOST_TOKENS))
            both[int(product.gate is None)] = chosen[product]
        decoder.layers[i] = replace(layer, experts_in_gluon=(both[0], both[1]))
    log.info("products of experts that Gluon computes: %d of %d", sum(chosen.values()), len(chosen))


def _products(layer: Layer) -> Iterator[tuple[ExpertProduct, Tensor]]:
    """Each product without bias, as moe_experts has them, of weights in 16 or 32 bits."""
    spec, weights = layer.spec.feed_forward, layer.weights
    if not isinstance(spec, MoeSpec):
        return
    gate_up, down, top_k = weights.experts_gate_up, weights.experts_down, spec.routing.top_k
    # Of experts that a library has, the kernel in Gluon does not know the order.
    if isinstance(gate_up, Tensor) and weights.experts_gate_up_bias is None and weights.experts_libraries is None:
        yield ExpertProduct(gate_up.shape, top_k, ACTIVATIONS[spec.expert.activation]), gate_up
    if isinstance(down, Tensor) and weights.experts_down_bias is None:
        yield ExpertProduct(down.shape, top_k, None), down


def _is_faster(lane: Lane, product: ExpertProduct, weight: Tensor, num_tokens: int) -> bool:
    both = made_on(lane, partial(_both, product, weight, num_tokens))
    if both is None:
        return False
    name = f"{'second' if product.gate is None else 'first'} products of experts, {list(product.shape)},"
    contest = Contest(name, "computed", num_tokens, is_relative=True)
    return fastest(contest, both[0], [(Gluon(), both[1])], timed_on(lane, NUM_CALLS)) is not None


def _both(product: ExpertProduct, weight: Tensor, num_tokens: int) -> tuple[Work, Work] | None:
    """The product of so many random tokens by the plain kernel, and by the other; None: that does not take it."""
    (num_experts, rows, k), gate = product.shape, product.gate
    experts = torch.randint(num_experts, (num_tokens, product.top_k), dtype=torch.int32, device=weight.device)
    order = moe_sort(experts, num_experts, block_m_of(experts.numel(), num_experts, weight.device))
    x = weight.new_empty(num_tokens * (product.top_k if gate is None else 1), k).normal_()
    if not hopper_experts.takes(x, weight, order, gate):
        return None

    def in_gluon() -> Tensor:
        out = x.new_empty(experts.numel(), rows if gate is None else rows // 2)
        hopper_experts.launch(x, weight, order, gate, out)
        return out

    return lambda: grouped_product(x, weight, order, x.dtype, gate=gate), in_gluon
