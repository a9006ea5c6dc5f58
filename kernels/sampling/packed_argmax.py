"""Scores packed with their ids in one integer: a maximum finds both, and among equal scores the lowest id."""

from __future__ import annotations

from ..common.lang import jit, tl


@jit
def pack_score(score: tl.tensor, ids: tl.tensor):
    """score: float32; ids: int64 below 2^32. int64, above `no_token` for every score that is a number."""
    bits = score.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0xFFFFFFFF - ids)


@jit
def no_token():
    return tl.full((), -9223372036854775808, tl.int64)


@jit
def id_of(packed: tl.tensor):
    """The id; 0 where there was no token."""
    return tl.where(packed == no_token(), 0, 0xFFFFFFFF - (packed & 0xFFFFFFFF))


@jit
def score_of(packed: tl.tensor):
    bits = (packed >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
