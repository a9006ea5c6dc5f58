"""Accuracy of methods of KV in 4 bits on the shipped model: `python -m benchmarks.engine.kv_methods [--texts 24]`.

Transformers computes the model in float32, whole texts at a time; keys and values are rounded within its attention, by
each method in torch. So methods can be compared that no worker has:

    transform     what workers store: the Hadamard transform of each vector, with one scale
    halves        the same with a scale of each half of a vector
    vectors       `transform` without the transform
    channels B    KIVI (arXiv 2402.02750): keys by channel over blocks of B tokens, values by token, least and largest
    ... + own B   the block of B tokens that the asking token is in, at full width: so KIVI keeps recent tokens, but by
                  position alone, so that the result does not depend on chunks
    foretold B    `transform` of keys less their channel's mean in the B tokens before the block, divided by its largest
                  number there: so that a key is finished when it is stored

Scales, means and least numbers are bfloat16. `bits`: of a stored number with its share of these, in heads of the model
and in heads of 128 numbers. `mean`: of the absolute differences of log-probabilities from those of full width.

--outliers F makes two of each head's numbers F and F / 2 times as large in keys, and as much smaller in queries, which
changes nothing at full width: large models have such numbers, the shipped one has none.
--only NAME ... measures these methods alone.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.accuracy import TINY
from benchmarks.engine.kv_accuracy import held_out
from diptych.kernels.kv.kv_scales import dequantise, hadamard, quantise, transform_size

GROUP = 2  # texts that are computed at once
BITS = 4
SCALE_BITS = 16
LARGE_HEAD = 128
BLOCKS = (16, 32, 64, 128)


def transformed(x: Tensor) -> Tensor:
    return dequantise(*quantise(x, torch.uint8))


def odd_numbers(x: Tensor) -> Tensor:
    """x: [..., D] float32. Odd numbers of 4 bits, times a scale of the last axis."""
    scale = to_bfloat16(x.abs().amax(-1, keepdim=True) / 15, is_larger=True).clamp_min(1e-30)
    return (2 * (x / scale / 2).floor().clamp(-8, 7) + 1) * scale


def transformed_halves(x: Tensor) -> Tensor:
    halves = hadamard(x).unflatten(-1, (2, -1))
    return hadamard(odd_numbers(halves).flatten(-2)) / transform_size(x.shape[-1])


def to_bfloat16(x: Tensor, is_larger: Tensor | bool) -> Tensor:
    """x: float32. The nearest bfloat16, as a float32, whose magnitude is no smaller, or is no larger."""
    rest = torch.as_tensor(is_larger).int() * 0xFFFF
    return (x.view(torch.int32) + rest & ~0xFFFF).view(torch.float32)


def in_16_steps(x: Tensor, axis: int) -> Tensor:
    """x: float32. Round to the nearest of 16 steps from the least number along the axis to the largest."""
    smallest = x.amin(axis, keepdim=True)
    least = to_bfloat16(smallest, is_larger=smallest < 0)
    step = to_bfloat16((x.amax(axis, keepdim=True) - least) / 15, is_larger=True).clamp_min(1e-30)
    return ((x - least) / step).round() * step + least


def by_channel(keys: Tensor, block: int) -> Tensor:
    """keys: [texts, heads, tokens, D]. Those of a last block that is not full stay as they are."""
    num = keys.shape[2] // block * block
    blocks = keys[:, :, :num].unflatten(2, (-1, block))
    return torch.cat((in_16_steps(blocks, 3).flatten(2, 3), keys[:, :, num:]), dim=2)


def foretold(keys: Tensor, block: int) -> Tensor:
    """keys: [texts, heads, tokens, D]. Those of the first block are transformed alone."""
    first, *others = keys.split(block, dim=2)
    found = [transformed(first)]
    for some in others:
        mean = found[-1].mean(2, keepdim=True).bfloat16().float()
        largest = (found[-1] - mean).abs().amax(2, keepdim=True).bfloat16().float().clamp_min(1e-4)
        found.append(transformed((some - mean) / largest) * largest + mean)
    return torch.cat(found, dim=2)


@dataclass(frozen=True)
class Rounding:
    of: Callable[[Tensor], Tensor]  # [texts, heads, tokens, D] float32
    scales: Callable[[int], float]  # number of scales and least numbers for each stored one, by D

    def bits(self, head_dim: int) -> float:
        """Number of bits that a stored number takes with its share of the scales."""
        return BITS + SCALE_BITS * self.scales(head_dim)


TRANSFORM = Rounding(transformed, lambda head_dim: 1 / head_dim)
HALVES = Rounding(transformed_halves, lambda head_dim: 2 / head_dim)
FORETOLD = Rounding(partial(foretold, block=32), lambda head_dim: 1 / head_dim + 2 / 32)
VECTORS = Rounding(odd_numbers, lambda head_dim: 1 / head_dim)
TOKENS = Rounding(partial(in_16_steps, axis=-1), lambda head_dim: 2 / head_dim)
CHANNELS = {block: Rounding(partial(by_channel, block=block), lambda _, block=block: 2 / block) for block in BLOCKS}


@dataclass(frozen=True)
class Method:
    keys: Rounding
    values: Rounding
    own_block: int = 0  # tokens of the block that stays at full width while a token of it asks; 0: none does

    def bits(self, head_dim: int) -> float:
        return (self.keys.bits(head_dim) + self.values.bits(head_dim)) / 2


METHODS = {
    "transform": Method(TRANSFORM, TRANSFORM),
    "halves": Method(HALVES, HALVES),
    "vectors": Method(VECTORS, VECTORS),
    **{f"channels {block}": Method(of, TOKENS) for block, of in CHANNELS.items()},
    **{f"channels {block} + own {block}": Method(of, TOKENS, block) for block, of in CHANNELS.items()},
    **{f"transform + own {block}": Method(TRANSFORM, TRANSFORM, block) for block in BLOCKS[:2]},
    **{f"halves + own {block}": Method(HALVES, HALVES, block) for block in BLOCKS[:2]},
    "foretold 32": Method(FORETOLD, TRANSFORM),
    "keys by channels 32": Method(CHANNELS[32], TRANSFORM),
    "values by token": Method(TRANSFORM, TOKENS),
}


class RoundedAttention:
    """Attention function of transformers, of the method that is set."""

    def __init__(self, outliers: float) -> None:
        self.method: Method | None = None  # full width
        self._outliers = outliers

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **rest: Any
    ) -> tuple[Tensor, None]:
        """query: [texts, N, tokens, D]; key, value: [texts, K, tokens, D]. Returns [texts, tokens, N, D]."""
        factors = torch.ones(key.shape[3])
        factors[3], factors[11] = self._outliers, max(self._outliers / 2, 1.0)
        query, key, method = query / factors, key * factors, self.method
        num_tokens, group = query.shape[2], query.shape[1] // key.shape[1]

        def of_heads(x: Tensor) -> Tensor:
            return x.repeat_interleave(group, 1)

        kept_keys, kept_values = (key, value) if method is None else (method.keys.of(key), method.values.of(value))
        scores = query @ of_heads(kept_keys).mT * scaling
        is_own = None
        if method is not None and method.own_block:
            block = torch.arange(num_tokens) // method.own_block
            is_own = block[:, None] == block
            scores = torch.where(is_own, query @ of_heads(key).mT * scaling, scores)
        later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        weights = scores.masked_fill_(later, -torch.inf).softmax(-1)
        attended = weights @ of_heads(kept_values)
        if is_own is not None:
            attended += (weights * is_own) @ of_heads(value - kept_values)
        return attended.transpose(1, 2).contiguous(), None


def measure(model: Any, texts: Tensor) -> tuple[Tensor, Tensor]:
    """texts: [texts, tokens]. Log-probability of each token but the first, float64, and the likeliest in its place."""
    found: list[tuple[Tensor, Tensor]] = []
    with torch.inference_mode():
        for some in texts.split(GROUP):
            logits = model(some).logits[:, :-1].log_softmax(-1)
            found.append((logits.gather(-1, some[:, 1:, None])[..., 0].double(), logits.argmax(-1)))
    logprobs, likeliest = zip(*found, strict=True)
    return torch.cat(logprobs), torch.cat(likeliest)


def report(model: Any, attention: RoundedAttention, texts: Tensor, names: Sequence[str]) -> None:
    dim = model.config.head_dim
    at = f"bits, {dim}", f"bits, {LARGE_HEAD}"
    print(f"{'method':24} {at[0]:>9} {at[1]:>9} {'perplexity':>10} {'agreement':>10} {'mean':>9}")
    full, likeliest = measure(model, texts)
    print(f"{'full width':24} {'':9} {'':9} {math.exp(-full.mean()):10.4f}", flush=True)
    for name in names:
        attention.method = method = METHODS[name]
        logprobs, own = measure(model, texts)
        bits = f"{method.bits(dim):9.3f} {method.bits(LARGE_HEAD):9.3f}"
        same, gap = (own == likeliest).double().mean(), (logprobs - full).abs().mean()
        print(f"{name:24} {bits} {math.exp(-logprobs.mean()):10.4f} {same:10.2%} {gap:9.5f}", flush=True)


def main() -> None:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--outliers", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    args = parser.parse_args()
    attention = RoundedAttention(args.outliers)
    ALL_ATTENTION_FUNCTIONS.register("rounded", attention)
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="rounded").eval()
    report(model, attention, torch.tensor(held_out(args.texts)), args.only)


if __name__ == "__main__":
    main()
