"""Products of one tile, for the matrix kernels of this folder: rows of x times rows of a weight, in float32.

Device functions, each a loop over the shared axis K, which is contiguous in both. A kernel finds the rows of x (any:
sorted by expert, gathered) and of the weight (n) that its tile needs, clamped to what exists, so that no load but that
of the end of K is masked; it calls a product, and writes the part of the tile that is real.

The weight is the first factor where SWAP: few rows then fill the narrow side of a matrix instruction, not 16 of its 64
rows; and on Hopper only the first factor may come from registers, where packed weights are unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.lang import jit, tl


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch configuration of a matrix kernel."""

    block_m: int  # rows of x
    block_n: int  # rows of the weight
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_core: int = 1  # of persistent kernels


@jit
def place_of(tile: tl.tensor, row_tiles: tl.tensor, column_tiles: tl.tensor):
    """(row tile, column tile) of the tile'th: eight row tiles at a time, so that L2 holds what they share."""
    band = tile // (8 * column_tiles)
    rows = tl.minimum(row_tiles - band * 8, 8)
    within = tile % (8 * column_tiles)
    return band * 8 + within % rows, within // rows


@jit
def dense_product(
    x: tl.tensor,  # rows of K elements
    x_rows: tl.tensor,  # [BLOCK_M] int64: where each row begins, in elements
    weight: tl.tensor,  # [N, K]
    n: tl.tensor,  # [BLOCK_N] int64, each < N
    weight_stride: int,
    x_scales: tl.tensor,  # [rows, ceil(K / 128)] float32, where BLOCK_SCALED
    x_scale_rows: tl.tensor,  # [BLOCK_M] int64: where each row's scales begin
    weight_scales: tl.tensor,  # [ceil(N / 128), ceil(K / 128)] float32, where BLOCK_SCALED
    weight_scale_stride: int,
    k_from: int,  # a multiple of BLOCK_K
    k_to: int,
    BLOCK_SCALED: tl.constexpr,  # a scale for each 1 x 128 of x and 128 x 128 of the weight; then 128 % BLOCK_K == 0
    ONE_SCALE: tl.constexpr,  # if BLOCK_SCALED: all n are in one block of 128
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,  # (k_to - k_from) % BLOCK_K == 0
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACC: tl.constexpr,  # int32 for whole numbers, else float32
):
    """Returns [BLOCK_M, BLOCK_N], float32 where BLOCK_SCALED, else ACC. x and weight: one dtype, floats or int8.

    Scales of blocks: DeepSeek-V3 (2024), section 3.3. Each is applied to the float32 sum of its 128 products, so that
    the short accumulators of Hopper's fp8 instructions never hold more.
    """
    i = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32 if BLOCK_SCALED else ACC)
    x_at = x + x_rows[:, None] + i[None, :]
    weight_at = weight + n[:, None] * weight_stride + i[None, :]
    first_n = tl.min(n, 0)
    next_scale = tl.zeros((BLOCK_M,), tl.float32)
    if BLOCK_SCALED:
        # What is not copied ahead with the tiles is loaded a turn before it is needed.
        next_scale = _scales_at(
            x_scales, x_scale_rows, weight_scales, first_n, weight_scale_stride, k_from, k_to, ONE_SCALE
        )
    for start in range(k_from, k_to, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_at + start)
            b = tl.load(weight_at + start)
        else:
            used = (start + i < k_to)[None, :]
            a = tl.load(x_at + start, mask=used, other=0.0)
            b = tl.load(weight_at + start, mask=used, other=0.0)
        if BLOCK_SCALED:
            scale = next_scale
            next_scale = _scales_at(
                x_scales, x_scale_rows, weight_scales, first_n, weight_scale_stride, start + BLOCK_K, k_to, ONE_SCALE
            )
            if SWAP:
                part = tl.dot(b, tl.trans(a), input_precision="ieee", out_dtype=ACC).to(tl.float32)
                part *= scale[None, :]
            else:
                part = tl.dot(a, tl.trans(b), input_precision="ieee", out_dtype=ACC).to(tl.float32)
                part *= scale[:, None]
            if not ONE_SCALE:
                weight_scale = tl.load(weight_scales + n // 128 * weight_scale_stride + start // 128)
                part *= weight_scale[:, None] if SWAP else weight_scale[None, :]
            acc += part
        elif SWAP:
            # Hopper adds products of fp8 with 14 bits: BLOCK_K of them, then in float32. Few rows wait for memory.
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee", max_num_imprecise_acc=BLOCK_K, out_dtype=ACC)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee", out_dtype=ACC)
    if SWAP:
        acc = tl.trans(acc)
    return acc


@jit
def _scales_at(
    x_scales: tl.tensor,
    x_scale_rows: tl.tensor,
    weight_scales: tl.tensor,
    first_n: tl.tensor,
    weight_scale_stride: int,
    k: int,
    k_to: int,
    ONE_SCALE: tl.constexpr,
):
    """[BLOCK_M] float32: of x at k, or at the last one below k_to; times the weight's where that has but one here."""
    block = tl.minimum(k, k_to - 1) // 128
    scale = tl.load(x_scales + x_scale_rows + block)
    if ONE_SCALE:
        scale *= tl.load(weight_scales + first_n // 128 * weight_scale_stride + block)
    return scale


@jit
def packed_product(
    x: tl.tensor,  # rows of K elements
    x_rows: tl.tensor,  # [BLOCK_M] int64: where each row begins, in elements
    codes: tl.tensor,  # [N, bytes of a row], as packed_weight.py lays them out
    n: tl.tensor,  # [BLOCK_N] int64, each < N
    codes_stride: int,
    scales: tl.tensor,  # [groups, N]
    zeros: tl.tensor,  # [groups, N] int16, where HAS_ZEROS
    offsets: tl.tensor,  # [groups, N], where HAS_OFFSETS
    table: tl.tensor,  # [16] float32, of Coding.TABLE
    scale_stride: int,
    order: tl.tensor,  # [K] int32, where HAS_ORDER: the column of x that meets row i of the weight
    k_from: int,  # a multiple of BLOCK_K
    k_to: int,
    CODING: tl.constexpr,  # of packed_weight.py
    BITS: tl.constexpr,  # 4 or 8
    GROUP: tl.constexpr,  # a multiple of BLOCK_K unless SCALES_FIRST, or 0: one group
    SCALES_FIRST: tl.constexpr,  # weights are scaled, and rounded to x's dtype; else the sums of groups are scaled
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,  # only if SCALES_FIRST
    HAS_ORDER: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a multiple of 32
):
    """Returns [BLOCK_M, BLOCK_N] float32. A weight is (number - zero) * scale + offset of its group."""
    BYTES: tl.constexpr = BLOCK_K * BITS // 8
    byte = tl.arange(0, BYTES)
    # A byte holds the codes of k and k + 16, of each run of 32; or one code.
    k_of_byte = byte // 16 * 32 + byte % 16 if BITS == 4 else byte
    codes_at = codes + n[:, None] * codes_stride + byte[None, :]
    if SCALES_FIRST:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(k_from, k_to, BLOCK_K):
            k = start + k_of_byte
            if EVEN_K:
                code = tl.load(codes_at + start * BITS // 8)
            else:
                code = tl.load(codes_at + start * BITS // 8, mask=(k < k_to)[None, :], other=0)
            for half in tl.static_range(8 // BITS):  # pyright: ignore[reportGeneralTypeIssues]
                weight = _floats(((code >> (4 * half)) & 15) if BITS == 4 else code, table, CODING, BITS)
                if HAS_ZEROS:
                    weight -= _spread(zeros, n, start, half, k, k_to, scale_stride, BITS, GROUP, BLOCK_N, BLOCK_K)
                weight *= _spread(scales, n, start, half, k, k_to, scale_stride, BITS, GROUP, BLOCK_N, BLOCK_K)
                if HAS_OFFSETS:
                    weight += _spread(offsets, n, start, half, k, k_to, scale_stride, BITS, GROUP, BLOCK_N, BLOCK_K)
                columns = _columns(x, x_rows, order, k + 16 * half, k_to, HAS_ORDER, EVEN_K)
                acc = tl.dot(weight.to(columns.dtype), columns, acc, input_precision="ieee")
        return tl.trans(acc)
    return tl.trans(
        _product_of_groups(
            x,
            x_rows,
            codes_at,
            k_of_byte,
            n,
            scales,
            zeros,
            scale_stride,
            order,
            k_from,
            k_to,
            CODING,
            BITS,
            GROUP,
            HAS_ZEROS,
            HAS_ORDER,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
    )


@jit
def _product_of_groups(
    x: tl.tensor,
    x_rows: tl.tensor,
    codes_at: tl.tensor,  # [BLOCK_N, bytes of BLOCK_K]
    k_of_byte: tl.tensor,  # [bytes of BLOCK_K]
    n: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    scale_stride: int,
    order: tl.tensor,
    k_from: int,
    k_to: int,
    CODING: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns [BLOCK_N, BLOCK_M] float32, of parameters as packed_product has them.

    number - zero is exact in 16 bits; scales are applied to the float32 sums of their groups.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Scales are too small to be copied ahead with the tiles: they are loaded a turn before they are needed. (Zeros that
    # pass from turn to turn would make codes pass through shared memory once more.)
    next_scale = tl.load(scales + (tl.minimum(k_from, k_to - 1) // GROUP * scale_stride if GROUP else 0) + n)
    for start in range(k_from, k_to, BLOCK_K):
        group = start // GROUP if GROUP else 0
        zero = tl.load(zeros + group * scale_stride + n)[:, None] if HAS_ZEROS else tl.zeros((1, 1), tl.int16)
        scale = next_scale
        if GROUP:
            next_scale = tl.load(scales + tl.minimum(start + BLOCK_K, k_to - 1) // GROUP * scale_stride + n)
        k = start + k_of_byte
        if EVEN_K:
            code = tl.load(codes_at + start * BITS // 8)
        else:
            code = tl.load(codes_at + start * BITS // 8, mask=(k < k_to)[None, :], other=0)
        part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if GROUP else acc
        columns = _columns(x, x_rows, order, k, k_to, HAS_ORDER, EVEN_K)
        if BITS == 4:
            middle = _unpacked((zero + 8).to(tl.uint8), columns)
            part = tl.dot(_unpacked(code & 15, columns) - middle, columns, part, input_precision="ieee")
            columns = _columns(x, x_rows, order, k + 16, k_to, HAS_ORDER, EVEN_K)
            part = tl.dot(_unpacked(code >> 4, columns) - middle, columns, part, input_precision="ieee")
        elif CODING == 3:  # E4M3
            part = tl.dot(_float8(code).to(columns.dtype), columns, part, input_precision="ieee")
        else:
            part = tl.dot(code.to(columns.dtype) - zero.to(columns.dtype), columns, part, input_precision="ieee")
        if GROUP:
            acc += part * scale.to(tl.float32)[:, None]
        else:
            acc = part
    if not GROUP:
        acc *= next_scale.to(tl.float32)[:, None]
    return acc


@jit
def _spread(
    of_groups: tl.tensor,  # [groups, N]
    n: tl.tensor,
    start: int,
    half: tl.constexpr,
    k: tl.tensor,  # [columns]: of the first half
    k_to: int,
    scale_stride: int,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns what is stored for the group of each weight of a half of a tile, float32 [BLOCK_N, columns]."""
    last = (k_to - 1) // GROUP if GROUP else 0
    if (BITS == 8 or GROUP % 32 == 0) and (GROUP == 0 or BLOCK_K % GROUP == 0 or GROUP % BLOCK_K == 0):
        # Codes of a byte are of one group, and a tile has whole groups, or is of one: they are copied ahead with it.
        WIDTH: tl.constexpr = GROUP if GROUP and GROUP < BLOCK_K else BLOCK_K
        GROUPS: tl.constexpr = BLOCK_K // WIDTH
        group = tl.minimum((start // GROUP if GROUP else 0) + tl.arange(0, GROUPS), last)
        found = tl.trans(tl.load(of_groups + group[:, None] * scale_stride + n[None, :]))
        wide = tl.broadcast_to(found[:, :, None], (BLOCK_N, GROUPS, WIDTH * BITS // 8))
        spread = tl.reshape(wide, (BLOCK_N, BLOCK_K * BITS // 8))
    else:
        group = tl.minimum((k + 16 * half) // GROUP, last)
        spread = tl.load(of_groups + n[:, None] + (group * scale_stride)[None, :])
    return spread.to(tl.float32)


@jit
def _floats(code: tl.tensor, table: tl.tensor, CODING: tl.constexpr, BITS: tl.constexpr):
    """code: uint8, or int8 of whole numbers of 8 bits. Returns the numbers, float32.

    No conversion is needed: bits are put where a float32 has them, and a product moves the exponent.
    """
    if CODING == 1:  # E2M1
        bits = ((code & 8).to(tl.int32) << 28) | ((code & 7).to(tl.int32) << 22)
        number = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    elif CODING == 2:  # TABLE
        number = tl.load(table + code.to(tl.int32))
    elif CODING == 3:  # E4M3
        number = _float8(code)
    elif BITS == 4:
        number = (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0  # 2^23 + 8
    else:
        number = ((code.to(tl.int32) + 128) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 128
    return number


@jit
def _float8(code: tl.tensor):
    """code: uint8, e4m3 and not NaN. Returns float32."""
    bits = ((code & 128).to(tl.int32) << 24) | ((code & 127).to(tl.int32) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@jit
def _unpacked(code: tl.tensor, like: tl.tensor):
    """code: uint8 of at most 16. Returns it in like's dtype, 128 (bfloat16) or 1024 (float16) too high.

    It becomes the last bits of that number, whose last place is worth 1: no conversion is needed.
    """
    if like.dtype == tl.bfloat16:
        value = (code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif like.dtype == tl.float16:
        value = (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        value = code.to(like.dtype)
    return value


@jit
def _columns(
    x: tl.tensor,
    x_rows: tl.tensor,
    order: tl.tensor,
    k: tl.tensor,  # [columns]
    k_to: int,
    HAS_ORDER: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """x[:, k] turned over: [columns, BLOCK_M]; 0 from k_to on."""
    column = tl.load(order + k, mask=k < k_to, other=0) if HAS_ORDER else k
    at = x + column[:, None] + x_rows[None, :]
    return tl.load(at) if EVEN_K else tl.load(at, mask=(k < k_to)[:, None], other=0.0)
