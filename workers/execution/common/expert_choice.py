"""Choice of the kernel for experts with many tokens on Hopper: kernels/moe/hopper_experts.py, or the plain one.

Asked for by DIPTYCH_UNTRIED_KERNELS alone. Each kind of product is timed at load, with a layer's own weights and random
rows; the new kernel is chosen where it gives what the plain one gives, in less time.
"""

import logging
import time
from collections.abc import Callable, Iterator
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
from ...models.layers.mlp import ACTIVATIONS

MOST_TOKENS = 4096
NUM_RUNS, NUM_IN_A_RUN = 3, 4
TOLERANCE = 2e-2  # of bfloat16 results, by the largest

log = logging.getLogger("diptych.worker")

Multiply = Callable[[], Tensor]
Both = list[tuple[Multiply, Multiply]]  # by the plain kernel and by the other; empty: that does not take it


def choose_expert_kernels(lane: Lane, decoder: Decoder, max_tokens: int) -> None:
    """Choose for each kind of product of the decoder's mixtures. max_tokens: of a step."""
    if not is_wanted("hopper-experts"):
        return

    def seconds(multiply: Multiply, results: list[Tensor]) -> float:
        def run() -> None:
            results[:] = [multiply()]

        began = time.perf_counter()
        for _ in range(NUM_IN_A_RUN):
            lane.run(run)
        lane.record().wait()
        return time.perf_counter() - began

    seen = set[hopper_experts.ExpertProduct]()
    for weight, top_k, gate in _products(decoder):
        product = hopper_experts.product_of(weight, gate)
        if product in seen | hopper_experts.chosen:
            continue
        seen.add(product)
        both = Both()
        make = partial(_multiplies, weight, top_k, gate, min(max_tokens, MOST_TOKENS))
        lane.run(partial(_extend, both, make))
        lane.record().wait()
        name = f"{'first' if product.is_gated else 'second'} product of experts, {list(product.weight_shape)}"
        if both and is_faster(name, *both[0], seconds):
            hopper_experts.chosen.add(product)
    log.info("products of experts that Gluon computes: %d of %d", len(seen & hopper_experts.chosen), len(seen))


def _extend(both: Both, make: Callable[[], Both]) -> None:
    both += make()


def _products(decoder: Decoder) -> Iterator[tuple[Tensor, int, int | None]]:
    """(weight, top_k, gate) of each product without bias, as moe_experts has them."""
    for layer in decoder.layers:
        spec, weights = layer.spec.feed_forward, layer.weights
        if not isinstance(spec, MoeSpec):
            continue
        gate_up, down, top_k = weights.experts_gate_up, weights.experts_down, spec.routing.top_k
        if isinstance(gate_up, Tensor) and weights.experts_gate_up_bias is None:
            yield gate_up, top_k, ACTIVATIONS[spec.expert.activation]
        if isinstance(down, Tensor) and weights.experts_down_bias is None:
            yield down, top_k, None


def _multiplies(weight: Tensor, top_k: int, gate: int | None, num_tokens: int) -> Both:
    """The product of so many random tokens."""
    num_experts, rows, k = weight.shape
    experts = torch.randint(num_experts, (num_tokens, top_k), dtype=torch.int32, device=weight.device)
    order = moe_sort(experts, num_experts, block_m_of(experts.numel(), num_experts, weight.device))
    x = weight.new_empty(num_tokens * (top_k if gate is None else 1), k).normal_()
    if not hopper_experts.takes(x, weight, order, gate):
        return []

    def in_gluon() -> Tensor:
        out = x.new_empty(experts.numel(), rows if gate is None else rows // 2)
        hopper_experts.launch(x, weight, order, gate, out)
        return out

    return [(lambda: grouped_product(x, weight, order, x.dtype, gate=gate), in_gluon)]


def is_faster(name: str, own: Multiply, other: Multiply, seconds: Callable[[Multiply, list[Tensor]], float]) -> bool:
    """Return whether `other` gives what `own` does, in less time. seconds: runs one of the two, puts what it gives into
    the list, and returns the time that it took."""
    times, firsts = list[float](), list[Tensor]()
    try:
        for multiply in (own, other):
            runs = list[float]()
            for run in range(1 + NUM_RUNS):
                results = list[Tensor]()
                runs.append(seconds(multiply, results))
                firsts += results[:1] if not run else []
            times.append(min(runs))
    except Exception as e:  # noqa: BLE001 (Gluon is not there, or its compiler fails: each in a way of its own)
        log.warning("%s: not in Gluon, which fails (%s: %s)", name, type(e).__name__, e)
        return False
    plain, new = firsts
    error = float((new - plain).abs().max() / plain.abs().max())
    if not error <= TOLERANCE:
        log.warning("%s: not in Gluon, whose results differ by %.3g", name, error)
        return False
    words = (name, times[1] * 1e6 / NUM_IN_A_RUN, times[0] * 1e6 / NUM_IN_A_RUN)
    log.info("%s: in Gluon %.0f us, by the plain kernel %.0f us", *words)
    return times[1] < times[0]
