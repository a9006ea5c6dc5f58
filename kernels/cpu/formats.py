"""Storage formats of weights for the compiled kernels' products. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum


class Format(IntEnum):
    """Storage format of weights."""

    PLAIN = 0  # as they are
    INT8 = 1  # whole numbers of 8 bits
    INT4 = 2  # from -8 to 7
    TABLE4 = 3  # numbers of 4 bits, each of which stands for one of 16 floats
    FP8 = 4  # e4m3
    W8A8 = 5  # whole numbers of 8 bits, by which rows are multiplied that are quantised as they come

    @property
    def inputs(self) -> int:
        """Number of inputs of an output that a word of 32 bits holds; not of PLAIN."""
        return 8 if self in (Format.INT4, Format.TABLE4) else 4


WHOLE = {Format.INT8, Format.INT4, Format.W8A8}
# What `pack` makes of weights; those of other formats come as numbers.
AT_LOAD = (Format.PLAIN, Format.INT8, Format.INT4, Format.W8A8)
MOST_IN_GROUP, GROUP_MULTIPLE = 512, 8  # inputs that share a scale, where not all do: linear.h


@dataclass(frozen=True, slots=True)
class NumberLayout:
    """Layout of the numbers of a weight [n, k]: a weight is number x scale + offset."""

    format: Format
    group: int  # consecutive inputs that share a scale and an offset; the number of inputs, where all do
    has_offsets: bool = False
    has_order: bool = False  # inputs stand in another order than rows have, which is stored beside
    has_fp8_rows: bool = False  # of FP8: made for rows in FP8, which a GPU that multiplies them quantises as they come

    def num_bytes(self, n: int, k: int) -> int:
        """Number of bytes of the numbers, and of their float32 scales and offsets."""
        numbers = -(-k // 2) if self.format.inputs == 8 else k
        return n * numbers + (8 if self.has_offsets else 4) * n * -(-k // self.group)


def layout_of_parts(parts: Sequence[NumberLayout | None], k: int, inputs: range) -> NumberLayout | None:
    """Return the one layout in which weights [n_i, k] are packed below one another, of their `inputs` alone; None:
    there is none. Scales are repeated where a group is cut, or where groups are unlike."""
    found = _packed_layout(parts, k, inputs)
    if found is None or not all(of is not None and of.has_fp8_rows for of in parts):
        return found
    return replace(found, has_fp8_rows=True)


def _packed_layout(parts: Sequence[NumberLayout | None], k: int, inputs: range) -> NumberLayout | None:
    """Compute what layout_of_parts does, but for rows in FP8."""
    layouts = [of for of in parts if of is not None]
    formats, orders = {of.format for of in layouts}, {of.has_order for of in layouts}
    if not layouts or len(layouts) < len(parts) or not (len(formats) == 1 or formats <= WHOLE):
        return None
    if len(orders) > 1 or (True in orders and len(inputs) < k):  # a part of the inputs has parts of many groups
        return None
    format = formats.pop() if len(formats) == 1 else Format.INT8
    has_offsets = any(of.has_offsets for of in layouts)
    assert format != Format.W8A8 or all(of.group == k and not of.has_offsets for of in layouts)
    groups = [of.group for of in layouts if of.group < k]
    if groups:
        common = math.gcd(*groups, inputs.start, len(inputs))
        fitting = (n for n in (common, 512, 256, 128, 64, 32, 16, 8) if n <= MOST_IN_GROUP and common % n == 0)
        group = next((n for n in fitting if n % GROUP_MULTIPLE == 0), None)
        return None if group is None else NumberLayout(format, group, has_offsets, True in orders)
    if format.inputs == 4 and not has_offsets:
        return NumberLayout(format, len(inputs))
    rounded = -(-len(inputs) // GROUP_MULTIPLE) * GROUP_MULTIPLE
    return NumberLayout(format, min(rounded, MOST_IN_GROUP), has_offsets)


def group_of(format: Format, k: int) -> int:
    """Number of inputs of an output that share a scale, where weights are quantised at load."""
    if format == Format.TABLE4:
        return 32  # MXFP4: OCP Microscaling Formats v1.0, section 5
    if format != Format.INT4:
        return k
    return next((group for group in (128, 64) if k % group == 0), 32)


def stored_bytes(n: int, k: int, item_bytes: int, format: Format) -> int:
    """Bytes of a weight [n, k] that is quantised at load, and of its float32 scales. item_bytes: of a number that is
    stored as it is."""
    return n * k * item_bytes if format == Format.PLAIN else NumberLayout(format, group_of(format, k)).num_bytes(n, k)
