"""Latent attention as DeepSeek-V2 and V3 have it: latents of 512 beside rotated keys of 64, for 128 query heads.

Decode, absorbed. Bytes: each latent once, the queries and the outputs. Flops: 2 N (512 + 64) + 2 N 512 a token seen.
Prefill, projected to keys of 128 + 64 and values of 128. Flops: 2 N (192 + 128) for each pair that sees each other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from diptych.kernels.attention.decode_plan import DecodePlan, Decodes
from diptych.kernels.attention.libraries.cudnn_calls import Sizes
from diptych.kernels.attention.libraries.prompt_library import find_library
from diptych.kernels.attention.paged_batch import LatentPromptLibrary
from diptych.kernels.common.tuning import chip_of
from diptych.kernels.mla.cudnn_latents import find_cudnn_latents
from diptych.kernels.mla.decode import mla_decode_triton, mla_decode_twin, plan_mla_decode
from diptych.kernels.mla.hopper_latents import HopperLatents, knows
from diptych.kernels.mla.latent_library import find_latent_library
from diptych.kernels.mla.prefill import Chunks, mla_prefill_triton

from .common import DEVICE, HALF, IS_TINY, Case, Goal, Random, sized

RANK, ROPE, DIM = sized((512, 64, 128), (32, 16, 16))
BLOCK_SIZE = sized(64, 16)
SCALE = (DIM + ROPE) ** -0.5
FLASH_MLA = find_latent_library(torch.device(DEVICE))
FOUND = find_library(torch.device(DEVICE)), find_cudnn_latents(torch.device(DEVICE), Sizes.of(4096, 4096))
LIBRARIES: list[LatentPromptLibrary] = [found for found in FOUND if found is not None]
GLUON_REGISTERS = (216, 224)  # of a thread that multiplies


@dataclass(frozen=True)
class DecodeInputs:
    q: Tensor  # [S, N, rank + rope]
    cache: Tensor  # [blocks, block_size, rank + rope]
    decodes: Decodes
    plan: DecodePlan  # made once a step for all layers


def make_decode(seed: int, num_seqs: int, context: int, num_heads: int) -> DecodeInputs:
    random = Random(seed)
    width = context // BLOCK_SIZE
    assert width * BLOCK_SIZE == context
    cache = random.normal(num_seqs * width, BLOCK_SIZE, RANK + ROPE)
    decodes = Decodes(
        random.order(num_seqs * width).int().view(num_seqs, width),
        torch.full((num_seqs,), context, dtype=torch.int32, device=DEVICE),
        torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE),
        1,
    )
    q = random.normal(num_seqs, num_heads, RANK + ROPE)
    return DecodeInputs(q, cache, decodes, plan_mla_decode(decodes, cache, num_heads, RANK))


def run_decode(x: DecodeInputs) -> Tensor:
    return mla_decode_triton(x.q[..., :RANK], x.q[..., RANK:], x.cache, x.decodes, x.plan, SCALE)


def by_gluon(registers: int) -> Callable[[DecodeInputs], Tensor]:
    """The kernel in Gluon, whether the environment names it or not."""
    kernels: list[HopperLatents] = []

    def run(x: DecodeInputs) -> Tensor:
        kernels[:] = kernels or [HopperLatents(registers)]
        inputs = x.q[..., :RANK], x.q[..., RANK:], x.cache, x.decodes
        assert kernels[0].takes(*inputs)
        return kernels[0].attend(*inputs, x.plan, SCALE)

    return run


def decode_reference(x: DecodeInputs, _: object) -> Tensor:
    return mla_decode_twin(x.q[..., :RANK], x.q[..., RANK:], x.cache, x.decodes, x.plan, SCALE)


def gather_sdpa(x: DecodeInputs) -> Tensor:
    """All heads of a sequence as the rows of one matrix beside its gathered latents."""
    blocks = x.decodes.block_tables
    latents = x.cache.index_select(0, blocks.view(-1)).view(len(blocks), 1, -1, RANK + ROPE)
    out = scaled_dot_product_attention(x.q[:, None], latents, latents[..., :RANK], scale=SCALE)
    return out[:, 0]


def by_flash_mla(x: DecodeInputs) -> Tensor:
    assert FLASH_MLA is not None
    inputs = x.q[..., :RANK], x.q[..., RANK:], x.cache, x.decodes
    assert FLASH_MLA.takes(*inputs)
    return FLASH_MLA.attend(*inputs, x.plan, SCALE)


def decode_case(num_seqs: int, context: int, num_heads: int, goals: tuple[Goal, ...] = ()) -> Case:
    peers: dict[str, Callable[[DecodeInputs], object]] = {"gather + SDPA": gather_sdpa}
    if FLASH_MLA is not None and not IS_TINY:
        peers[FLASH_MLA.name] = by_flash_mla
    if "sm_90" in chip_of(DEVICE).kinds and knows(num_heads, RANK, ROPE, HALF):
        peers |= {f"Gluon, {registers} registers": by_gluon(registers) for registers in GLUON_REGISTERS}
    tokens = num_seqs * context
    return Case(
        "MLA decode",
        f"{num_seqs} x {context}, {num_heads} heads",
        lambda seed: make_decode(seed, num_seqs, context, num_heads),
        run_decode,
        decode_reference,
        HALF.itemsize * (tokens * (RANK + ROPE) + num_seqs * num_heads * (2 * RANK + ROPE)),
        2.0 * tokens * num_heads * (2 * RANK + ROPE),
        peers=peers,
        goals=goals,
    )


@dataclass(frozen=True)
class PrefillInputs:
    q: Tensor  # [T, N, dim + rope]
    keys: Tensor  # [T, N, dim]
    rope_keys: Tensor  # [T, rope]
    values: Tensor  # [T, N, dim]
    chunks: Chunks
    in_order: tuple[Tensor, Tensor, Tensor]  # [1, N, T, ...]: queries, whole keys, values


def make_prefill(seed: int, num_new: int, num_heads: int) -> PrefillInputs:
    random = Random(seed)
    q = random.normal(num_new, num_heads, DIM + ROPE)
    keys, values = random.normal(num_new, num_heads, 2 * DIM).chunk(2, dim=2)
    rope_keys = random.normal(num_new, RANK + ROPE)[:, RANK:]
    whole = torch.cat((keys, rope_keys[:, None].expand(-1, num_heads, -1)), dim=2)
    in_order = [t.transpose(0, 1)[None].contiguous() for t in (q, whole, values)]
    return PrefillInputs(q, keys, rope_keys, values, Chunks([num_new], [num_new]), (*in_order,))  # type: ignore[arg-type]


def run_prefill(x: PrefillInputs) -> Tensor:
    return mla_prefill_triton(x.q, x.keys, x.rope_keys, x.values, x.chunks, SCALE)


def sdpa_of(backend: SDPBackend) -> Callable[[PrefillInputs], Tensor]:
    """flash takes values as wide as keys alone."""
    is_padded = backend == SDPBackend.FLASH_ATTENTION

    def sdpa(x: PrefillInputs) -> Tensor:
        queries, keys, values = x.in_order
        if is_padded:
            values = pad(values, (0, ROPE))
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=SCALE)
        return out[0, ..., :DIM].transpose(0, 1)

    return sdpa


BACKENDS = (
    {"SDPA math": SDPBackend.MATH}
    if IS_TINY
    else {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
)


def by(library: LatentPromptLibrary) -> Callable[[PrefillInputs], Tensor]:
    return lambda x: library.attend_latent(x.q, x.keys, x.rope_keys, x.values, x.chunks, SCALE)


def prefill_case(num_new: int, num_heads: int) -> Case:
    peers = {name: sdpa_of(backend) for name, backend in BACKENDS.items()}
    peers |= {library.name: by(library) for library in LIBRARIES}
    return Case(
        "MLA prefill",
        f"{num_new}, {num_heads} heads",
        lambda seed: make_prefill(seed, num_new, num_heads),
        run_prefill,
        lambda x, _: next(iter(peers.values()))(x),
        HALF.itemsize * num_new * (num_heads * (4 * DIM + ROPE) + ROPE),
        1.0 * num_new * (num_new + 1) * num_heads * (2 * DIM + ROPE),
        peers=peers,
    )


def cases() -> Iterator[Case]:
    long = (Goal("TB/s", 1.8, 2.8),)
    yield decode_case(*sized((32, 8192, 16), (2, 64, 5)), goals=long)
    yield decode_case(*sized((32, 8192, 128), (2, 64, 24)), goals=long)
    yield decode_case(*sized((4, 32768, 128), (1, 160, 5)), goals=long)
    yield prefill_case(*sized((4096, 128), (40, 3)))
