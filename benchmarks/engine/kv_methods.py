"""Accuracy of methods of KV in 4 bits on the shipped model: `python -m benchmarks.engine.kv_methods [--texts 24]`.

Transformers computes the model in float32, whole texts at a time; keys and values are rounded within its attention, by
each method in torch. So methods can be compared that no worker has:

    transform     what workers store: the Hadamard transform of each vector, with one scale
    vectors       the same without the transform
    channels      KIVI (arXiv 2402.02750): keys by channel over a block of tokens, values by token, least and largest
    ... + block   the block of the token that asks at full width, as KIVI keeps recent tokens

--outliers F makes two of each head's numbers F and F / 2 times as large in keys, and as much smaller in queries, which
changes nothing at full width: large models have such numbers, the shipped one has none.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.accuracy import TINY
from benchmarks.engine.kv_accuracy import held_out
from diptych.kernels.kv.kv_scales import dequantise, quantise

BLOCK = 32  # tokens that share a channel's scale
GROUP = 4  # texts that are computed at once


def transformed(x: Tensor) -> Tensor:
    return dequantise(*quantise(x, torch.uint8))


def by_vector(x: Tensor) -> Tensor:
    """Odd numbers of 4 bits, times a scale of the vector."""
    scale = (x.abs().amax(-1, keepdim=True) / 15).clamp_min(1e-30)
    return (2 * (x / scale / 2).floor().clamp(-8, 7) + 1) * scale


def in_16_steps(x: Tensor, axis: int) -> Tensor:
    """Round to the nearest of 16 steps from the least number along the axis to the largest."""
    least, largest = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    step = ((largest - least) / 15).clamp_min(1e-30)
    return ((x - least) / step).round() * step + least


def by_channel(keys: Tensor) -> Tensor:
    """keys: [texts, heads, tokens, D]. Those of a last block that is not full stay as they are."""
    num = keys.shape[2] // BLOCK * BLOCK
    blocks = keys[:, :, :num].unflatten(2, (-1, BLOCK))
    return torch.cat((in_16_steps(blocks, 3).flatten(2, 3), keys[:, :, num:]), dim=2)


def by_token(values: Tensor) -> Tensor:
    return in_16_steps(values, -1)


def unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Method:
    keys: Callable[[Tensor], Tensor] = unchanged
    values: Callable[[Tensor], Tensor] = unchanged
    keeps_block: bool = False  # the block of the token that asks, at full width


METHODS = {
    "full width": Method(),
    "transform": Method(transformed, transformed),
    "vectors": Method(by_vector, by_vector),
    "channels": Method(by_channel, by_token),
    "transform + block": Method(transformed, transformed, keeps_block=True),
    "channels + block": Method(by_channel, by_token, keeps_block=True),
}


class RoundedAttention:
    """Attention function of transformers, of the method that is set."""

    def __init__(self, outliers: float) -> None:
        self.method = METHODS["full width"]
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

        block = torch.arange(num_tokens) // BLOCK
        is_own = (block[:, None] == block) & torch.tensor(method.keeps_block)
        own, kept = (query @ of_heads(keys).mT * scaling for keys in (key, method.keys(key)))
        scores = torch.where(is_own, own, kept)
        later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        attended = (weights * is_own) @ of_heads(value) + (weights * ~is_own) @ of_heads(method.values(value))
        return attended.transpose(1, 2).contiguous(), None


def main() -> None:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--outliers", type=float, default=1.0)
    args = parser.parse_args()
    attention = RoundedAttention(args.outliers)
    ALL_ATTENTION_FUNCTIONS.register("rounded", attention)
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="rounded").eval()
    texts = torch.tensor(held_out(args.texts))
    print(f"{'method':18} {'perplexity':>10} {'agreement':>10} {'mean':>9}")
    full: tuple[Tensor, Tensor] | None = None
    for name, attention.method in METHODS.items():
        with torch.inference_mode():
            found = [model(some).logits[:, :-1].log_softmax(-1) for some in texts.split(GROUP)]
        logits = torch.cat(found)
        logprobs, likeliest = logits.gather(-1, texts[:, 1:, None]).double(), logits.argmax(-1)
        full = full or (logprobs, likeliest)
        same, gap = (likeliest == full[1]).double().mean(), (logprobs - full[0]).abs().mean()
        print(f"{name:18} {math.exp(-logprobs.mean()):10.4f} {same:10.2%} {gap:9.5f}", flush=True)


if __name__ == "__main__":
    main()
