"""Choice of what multiplies by fp8 weights: our kernel, or a library (kernels/gemm/scaled_library.py).

Made for each shape of weight and kind of scales, and each range of rows for which our kernel is another. The weights
keep it; products of experts stay with the kernel here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ....kernels.gemm.quantise_rows import quantise_rows
from ....kernels.gemm.scaled_gemm import ScaledLibrary, ScaledWeight, row_limits, scaled_gemm
from ....kernels.gemm.scaled_library import find_libraries
from ...device.device import Lane
from ...models.checkpoint.weights import DecoderWeights, LayerWeights
from ...models.layers.decoder import Decoder
from ...models.plan.formats import IN_LAYERS
from .timed_choice import MOST_TOKENS, Contest, Work, fastest, made_on, timed_on, works

NUM_CALLS = 4  # of a run

Libraries = tuple[tuple[int, ScaledLibrary | None], ...]  # as ScaledWeight has them


@dataclass(frozen=True, slots=True)
class ProductKind:
    """One of a model's products, as far as a kernel's time and its code depend on it."""

    shape: torch.Size  # of the weight, [N, K]
    has_blocks: bool
    has_bias: bool


def choose_products(lane: Lane, decoder: Decoder, max_tokens: int) -> None:
    """Choose for each kind of product of the decoder's layers and head. max_tokens: of a step."""
    like = decoder.weights.embed
    if not (libraries := find_libraries(like.device)):
        return
    chosen = dict[ProductKind, Libraries]()
    for holder, name, weight, bias in _products(decoder.weights):
        kind = ProductKind(weight.shape, weight.has_blocks, bias is not None)
        if kind not in chosen:
            product = _Product(replace(weight, libraries=()), bias, like.dtype)
            chosen[kind] = _chosen(lane, libraries, product, max_tokens)
        setattr(holder, name, replace(weight, libraries=chosen[kind]))


def _products(
    weights: DecoderWeights,
) -> Iterator[tuple[DecoderWeights | LayerWeights, str, ScaledWeight, Tensor | None]]:
    """(its holder, the field, weight, bias) of each product by a weight in fp8 whose rows are quantised."""
    for holder, names in ((weights, ("lm_head",)), *((layer, IN_LAYERS) for layer in weights.layers)):
        for name in names:
            weight = getattr(holder, name)
            if isinstance(weight, ScaledWeight) and weight.values.dim() == 2 and weight.values.is_floating_point():
                yield holder, name, weight, getattr(holder, f"{name}_bias", None)


@dataclass(frozen=True, slots=True)
class _Product:
    weight: ScaledWeight
    bias: Tensor | None
    dtype: torch.dtype  # of rows and results

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Random rows as the weight takes them, and their scales."""
        x = torch.randn(num_rows, self.weight.shape[1], dtype=self.dtype, device=self.weight.device)
        return quantise_rows(x, self.weight.values.dtype, self.weight.has_blocks)

    def by(self, library: ScaledLibrary | None, rows: tuple[Tensor, Tensor]) -> Tensor:
        if library is None:
            return scaled_gemm(*rows, self.weight, self.dtype, self.bias)
        return library.multiply(*rows, self.weight, self.bias)


def _chosen(lane: Lane, libraries: list[ScaledLibrary], product: _Product, max_tokens: int) -> Libraries:
    what, timed = f"products by fp8 weights {list(product.weight.shape)}", timed_on(lane, NUM_CALLS)
    chosen, first = list[tuple[int, ScaledLibrary | None]](), 1
    for last in (*(limit for limit in row_limits(product.weight.device) if limit < max_tokens), max_tokens):
        rows = made_on(lane, partial(product.rows, min(last, MOST_TOKENS)))
        taking = [of for of in libraries if of.takes(*rows, product.weight, product.dtype, product.bias)]
        others: list[tuple[ScaledLibrary, Work]] = [(of, partial(product.by, of, rows)) for of in taking]
        contest = Contest(what, "computed", len(rows[0]), is_relative=True)
        library = fastest(contest, partial(product.by, None, rows), others, timed) if others else None
        if library is not None and not _is_ready(lane, library, product, (first, last)):
            library = None
        chosen.append((last, library))
        first = last + 1
    return tuple(chosen)


def _is_ready(lane: Lane, library: ScaledLibrary, product: _Product, of: tuple[int, int]) -> bool:
    """Return whether the library multiplies the fewest of such rows too. It compiles what it needs for any number of
    them: no request waits for it. of: first and last."""
    first, last = of

    def multiply() -> None:
        for num_rows in sorted({first, *(min(num, last) for num in library.compiled_rows(last) if num >= first)}):
            lane.run(lambda num=num_rows: product.by(library, product.rows(num)))
        lane.record().wait()

    shape = list(product.weight.shape)
    return works(f"products of {first} to {last} rows by fp8 weights {shape}", "computed", library, multiply)
