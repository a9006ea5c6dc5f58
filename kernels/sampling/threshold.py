"""Threshold of top-k and top-p, without a sort: each pass cuts the range of values at two pivots."""

from __future__ import annotations

from ..common.lang import jit, tl


@jit
def sum_within(values: tl.tensor, num: int, one: tl.tensor, two: tl.tensor, IS_COUNT: tl.constexpr, TILE: tl.constexpr):
    """Number of the values (or sum of their exponentials) within each of two distances from 0, given as bits."""
    near, far = 0.0, 0.0
    for start in range(0, num, TILE):
        i = start + tl.arange(0, TILE)
        value = tl.load(values + i, mask=i < num, other=float("-inf"))
        distance = tl.abs(value).to(tl.int32, bitcast=True)
        weight = tl.full((TILE,), 1.0, tl.float32) if IS_COUNT else tl.exp(value)
        near += tl.sum(tl.where(distance <= one, weight, 0.0), axis=0)  # pyright: ignore[reportOperatorIssue]
        far += tl.sum(tl.where(distance <= two, weight, 0.0), axis=0)  # pyright: ignore[reportOperatorIssue]
    return near, far


@jit
def find_threshold(
    values: tl.tensor,  # [num] float32, finite, at most 0
    num: int,
    wanted: tl.tensor,  # float32
    high: tl.tensor,  # int32: where to end if the values do not reach `wanted`
    IS_COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Least distance from 0 within which the values' weights sum to `wanted`, as bits: the bits of floats >= 0 are in
    the order of the floats. Each pass leaves a third of the range."""
    low = -1
    while high - low > 1:
        third = tl.maximum((high - low) // 3, 1)
        one, two = low + third, high - third
        near, far = sum_within(values, num, one, two, IS_COUNT, TILE)
        low = tl.where(far < wanted, two, tl.where(near < wanted, one, low))
        high = tl.where(near >= wanted, one, tl.where(far >= wanted, two, high))
    return high
