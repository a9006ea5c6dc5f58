"""Plan of a worker's KV: what it keeps of a model, and how many blocks fit in the memory that it may use. No torch."""

import math
from dataclasses import dataclass

from ...common.errors import ConfigError
from ...kv.dtypes import DTYPE_BYTES, GROUP, SCALE_BYTES, is_rounded_by_block, is_scaled, numbers_in, vector_bytes
from ...kv.layout import BLOCK_MAJOR, ROWS, SCALES_LAST, SCALES_LAST_SLOTS, KVLayout
from ..families.spec import KVShape, LatentSpec, ModelSpec

GPU_GRANULARITY = 2 << 20  # bytes, of CUDA's virtual memory on every GPU so far; a worker asks its own
MAX_CONTEXTS = 256  # a pool larger than this many full contexts would only reserve address space


@dataclass(frozen=True, slots=True)
class DraftKVShape:
    """KV that a model that drafts keeps of a token."""

    kv: KVShape
    model_id: str  # as workers compare it
    packing: str = ""  # see KVLayout.draft_packing
    num_ranks: int = 0  # see KVLayout.draft_tensor_parallel


def layout_of(
    spec: ModelSpec,
    dtype: str,
    block_size: int,
    *,
    model_id: str = "",
    axis_order: str = BLOCK_MAJOR,
    tensor_parallel: int = 1,
    packing: str = ROWS,
    draft: DraftKVShape | None = None,
) -> KVLayout:
    """spec: of the whole model. dtype: of its KV. model_id: as its workers compare it; only what is handed off needs
    one. draft: of a model that drafts."""
    kv = spec.kv
    shapes, draft_shapes, of_draft = kv.shapes, (), ("", "", 0, 0)
    if draft is not None:
        num_ranks = draft.num_ranks if draft.num_ranks < tensor_parallel else 0
        num_vectors = draft.kv.num_vectors if draft.kv.num_vectors != kv.num_vectors else 0
        draft_shapes, of_draft = draft.kv.shapes, (draft.model_id, draft.packing, num_ranks, num_vectors)
    return KVLayout(
        dtype,
        block_size,
        len(shapes) + len(draft_shapes),
        kv.num_heads,
        kv.dim,
        model_id,
        axis_order,
        tensor_parallel,
        packing,
        kv.num_vectors,
        (*shapes, *draft_shapes) if len({*shapes, *draft_shapes}) > 1 else (),
        len(draft_shapes),
        *of_draft,
    )


def packing_of(dtype: str, packing: str, *, on_gpu: bool) -> str:
    """Packing of KV of `dtype`, of a backend whose KV of full width has `packing`."""
    if is_rounded_by_block(dtype):
        return ROWS
    return SCALES_LAST if on_gpu and is_scaled(dtype) else packing


def check_kv_dtype(spec: ModelSpec, dtype: str, block_size: int, *, on_gpu: bool) -> None:
    """Raise ConfigError where KV of this model cannot be kept in `dtype`, in blocks of `block_size` tokens."""
    by_block = is_rounded_by_block(dtype)
    if not (is_scaled(dtype) or by_block):
        return
    dims = {layer.attention.head_dim for layer in spec.layers if not isinstance(layer.attention, LatentSpec)}
    if any(isinstance(layer.attention, LatentSpec) for layer in spec.layers):
        why = "does not work with latent attention, which keeps few bytes of a token as it is"
    elif any(dim % (multiple := GROUP if by_block else SCALE_BYTES * numbers_in(dtype)) for dim in dims):
        why = f"needs heads of a multiple of {multiple} numbers, and this model's have {', '.join(map(str, dims))}"
    elif by_block and block_size != GROUP:
        text = f"needs a block_size of {GROUP}, the tokens that it rounds together, and it is {block_size}"
        raise ConfigError(f"kv_dtype {dtype} {text}: set block_size to {GROUP}, or kv_dtype to auto")
    elif on_gpu and block_size % SCALES_LAST_SLOTS:
        text = f"needs on a GPU a block_size that is a multiple of {SCALES_LAST_SLOTS}, and it is {block_size}"
        raise ConfigError(f"kv_dtype {dtype} {text}: set block_size to 16, or kv_dtype to auto")
    else:
        return
    raise ConfigError(f"kv_dtype {dtype} {why}: leave it out, or set it to auto")


def tail_blocks(layout: KVLayout, max_running: int, step_tokens: int) -> int:
    """Number of blocks of the KV tail: those that two steps of so many tokens fill, one of them prepared ahead, and two
    of each running sequence, for a draft may reach into a second one. 0 where KV has no tail."""
    return 2 * (layout.num_blocks_for(step_tokens) + max_running) if layout.has_tail else 0


def tail_bytes(layout: KVLayout, dtype: str, max_running: int, step_tokens: int) -> int:
    """Bytes of the KV tail over all ranks, at full width. dtype: in which the model computes. See `tail_blocks`."""
    if not layout.has_tail:
        return 0
    num_blocks = tail_blocks(layout, max_running, step_tokens)
    numbers_of_block = layout.block_bytes * GROUP // vector_bytes(layout.dtype, GROUP)
    return num_blocks * numbers_of_block * DTYPE_BYTES[dtype]


def blocks_at_once(layout: KVLayout, granularity: int) -> int:
    """Smallest number of blocks whose bytes, in a rank's pool, are a multiple of `granularity`."""
    return granularity // math.gcd(granularity, layout.rank_block_bytes)


def most_blocks(layout: KVLayout, max_context_tokens: int, num_blocks: int, multiple: int = 1) -> int:
    """A multiple of `multiple`: of `num_blocks` that there is memory for, as many as a pool has; some MAX_CONTEXTS."""
    most = -(-layout.num_blocks_for(max_context_tokens) * MAX_CONTEXTS // multiple) * multiple
    return min(num_blocks // multiple * multiple, most)


def plan_num_blocks(layout: KVLayout, max_context_tokens: int, num_bytes: int, multiple: int = 1) -> int:
    """Blocks to make of `num_bytes` of all ranks together, see most_blocks. Raises ConfigError for less than a
    context."""
    per_context = layout.num_blocks_for(max_context_tokens)
    num_blocks = most_blocks(layout, max_context_tokens, num_bytes // layout.block_bytes, multiple)
    if num_blocks < per_context:
        needed = -(-per_context // multiple) * multiple
        at_once = f", {multiple} blocks at once," if multiple > 1 else ""
        fits = num_blocks * layout.block_size
        raise ConfigError(
            f"one context of {max_context_tokens} tokens needs {needed * layout.block_bytes:,} bytes of KV memory"
            f"{at_once} and {num_bytes:,} are reserved: raise kv_memory_bytes (or the memory fraction)"
            + (f", or lower max_context_tokens to {fits} or less" if fits else "")
        )
    return num_blocks
