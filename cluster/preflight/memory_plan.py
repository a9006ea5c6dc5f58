"""Plans memory before anything starts: bytes of weights and of KV on each rank, and what KV then holds.

Pure: a ModelSpec and sizes go in, numbers come out. The weights' arithmetic is the loader's own (weight_bytes.py), the
KV's that of the cache (kv/layout.py), so that a plan and a worker cannot differ.
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from ...workers.common.errors import ConfigError
from ...workers.config.worker_config import DEVICE_BATCH_TOKENS
from ...workers.core.scheduler_config import SchedulerConfig
from ...workers.kv.dtypes import DTYPE_BYTES, KV_DTYPES, is_scaled, stored_size, vector_bytes
from ...workers.models.families.spec import LatentSpec, ModelSpec
from ...workers.models.head_specs.head_bytes import head_weight_bytes
from ...workers.models.plan.compiled_limits import why_torch
from ...workers.models.plan.expert_placement import IN_ORDER
from ...workers.models.plan.formats import DECODED_ON_GPUS, check_shares
from ...workers.models.plan.kept_numbers import NONE, Layouts
from ...workers.models.plan.kv_plan import (
    GPU_GRANULARITY,
    DraftKVShape,
    blocks_at_once,
    check_kv_dtype,
    layout_of,
    most_blocks,
    tail_bytes,
)
from ...workers.models.plan.sharding import Share, share_of_first, share_of_worker
from ...workers.models.plan.weight_bytes import weight_bytes

PARTS: tuple[str, ...] = ("embeddings", "attention", "MLP", "experts", "norms", "head")  # as a token meets them


@dataclass(frozen=True, slots=True)
class Parallelism:
    dtype: str = "bfloat16"
    quantize: str | None = None
    tensor_parallel: int = 1
    block_size: int = 16
    expert_parallel: int = 1  # or tensor_parallel: ranks have whole experts, in order
    data_parallel: int = 1  # workers that share experts so; each is a rank of the plan
    on_gpus: bool = False  # each rank on a separate GPU
    draft_tensor_parallel: int | None = None  # ranks that compute a draft: 1, the first; None: all
    kv_dtype: str = "auto"  # as the setting: auto, the model's

    @property
    def kv_stored_as(self) -> str:
        """Dtype of the KV cache, of kv/dtypes.py."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A model that drafts, or a head, on the target's ranks."""

    spec: ModelSpec  # of the layers whose KV it keeps: a model's, or a head's own
    head: Path | None = None  # its folder
    layouts: Layouts | None = None  # of a model's weights, as plan_memory has them

    @property
    def name(self) -> str:
        """Name of its part among those of the weights."""
        return "draft model" if self.head is None else "draft head"

    def num_ranks(self, how: Parallelism) -> int:
        """Number of a worker's ranks that compute it. Raises ConfigError."""
        given, ranks = how.draft_tensor_parallel, how.tensor_parallel
        if given not in (None, 1, ranks):
            raise ConfigError(f"draft_tensor_parallel must be 1 or tensor_parallel ({ranks}), got {given}")
        return 1 if self.head is not None else given or ranks

    def weight_bytes(self, target: ModelSpec, share: Share, dtype: str, quantize: str | None, *, keeps: bool) -> int:
        """Number of bytes of a rank's share of its weights. keeps: whether those stay as they are stored that can.
        Raises CheckpointError for broken files of a head."""
        if self.head is not None:
            return head_weight_bytes(self.head, target, dtype)
        return sum(
            weight_bytes(self.spec, share, dtype, quantize, self.layouts if keeps and self.layouts else NONE).values()
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that each rank may use, and the part of it for KV."""

    rank_bytes: int
    kv_fraction: float  # of the free memory after the weights are loaded
    kv_bytes: int | None = None  # of a whole worker; None: by fraction


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Memory plan of a rank. All quantities in bytes."""

    weights: dict[str, int]  # by part of the model
    free_bytes: int  # once they are there; below 0: they do not fit
    kv_bytes: int  # set aside
    num_tokens: int  # whose KV that holds, in whole blocks

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    def num_sequences(self, num_tokens: int, block_size: int) -> int:
        """Number of sequences of `num_tokens` each whose KV fits at once."""
        per_sequence = -(-num_tokens // block_size) * block_size
        return self.num_tokens // per_sequence


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    first: RankPlan  # rank 0
    other: RankPlan | None  # the one of the others whose weights take most
    token_bytes: int  # of KV, on one rank
    max_context_tokens: int
    full_size_because: str | None  # who computes, of weights that were to be quantised, or are
    tail_bytes: int = 0  # of the KV tail, on one rank, not among those that are free

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit: the rank with the least room decides."""
        return min(rank.num_tokens for rank in (self.first, self.other) if rank is not None)


def plan_memory(
    spec: ModelSpec,
    how: Parallelism,
    memory: Memory,
    max_context_tokens: int | None = None,
    draft: PlannedDraft | None = None,
    layouts: Layouts = NONE,
) -> MemoryPlan:
    """draft: on ranks that can share it. layouts: of the weights that can be kept as they are stored.
    Raises ConfigError for ranks that cannot share the model, or a context that it was not made for, and CheckpointError
    for files of a draft."""
    longest = max_context_tokens or spec.max_position_embeddings
    if longest > spec.longest_context:
        raise ConfigError(f"max_context_tokens={longest} is more than the model's {spec.longest_context}")
    shares = _shares(spec, how)
    check_shares(spec, how.quantize, how.tensor_parallel)
    check_kv_dtype(spec, how.kv_stored_as, how.block_size, on_gpu=how.on_gpus)
    num_draft_ranks = 0 if draft is None else draft.num_ranks(how)
    draft_kv = DraftKVShape(draft.spec.kv, "", num_ranks=num_draft_ranks) if draft is not None else None
    layout = layout_of(spec, how.kv_stored_as, how.block_size, tensor_parallel=how.tensor_parallel, draft=draft_kv)

    why = _why_full_size(spec, how, whole_experts=shares[0].experts is not None)
    quantize = how.quantize if why is None else None
    is_joined = how.on_gpus and how.tensor_parallel > 1
    multiple = blocks_at_once(layout, GPU_GRANULARITY) if is_joined else 1

    sizes = SchedulerConfig().max_running, DEVICE_BATCH_TOKENS["cuda" if how.on_gpus else "cpu"]
    num_tail_bytes = tail_bytes(layout, how.dtype, *sizes) // how.tensor_parallel

    def rank(share: Share) -> RankPlan:
        decoded = DECODED_ON_GPUS if how.on_gpus else ()
        kept = layouts if why is None else NONE
        weights = _by_part(weight_bytes(spec, share, how.dtype, quantize, kept, decoded))
        if draft is not None and share.rank < num_draft_ranks:
            own = Share(share.rank, num_draft_ranks)
            weights[draft.name] = draft.weight_bytes(spec, own, how.dtype, quantize, keeps=why is None)
        free = memory.rank_bytes - sum(weights.values()) - num_tail_bytes
        wanted = int(max(free, 0) * memory.kv_fraction)
        if memory.kv_bytes is not None:
            wanted = memory.kv_bytes // how.tensor_parallel
        num_blocks = most_blocks(layout, longest, wanted // layout.rank_block_bytes, multiple)
        return RankPlan(weights, free, num_blocks * layout.rank_block_bytes, num_blocks * how.block_size)

    first, *others = map(rank, shares)
    other = max(others, key=lambda of: of.weight_bytes) if others else None
    token_bytes, because = layout.rank_block_bytes // how.block_size, why if how.quantize or layouts else None
    return MemoryPlan(first, other, token_bytes, longest, because, num_tail_bytes)


def _why_full_size(spec: ModelSpec, how: Parallelism, *, whole_experts: bool) -> str | None:
    """Return who computes with weights that are not held quantised; None if they are held quantised."""
    if how.on_gpus:
        return None
    size, kept = how.block_size, how.kv_stored_as
    why = why_torch(spec, size, how.tensor_parallel, kv_dtype=kept, whole_experts=whole_experts)
    return None if why is None else f"torch computes: {why}"


def _shares(spec: ModelSpec, how: Parallelism) -> list[Share]:
    """Return the share of each rank, or of each worker that shares experts."""
    if how.expert_parallel not in (1, how.tensor_parallel):
        raise ConfigError(f"expert_parallel must be 1 or tensor_parallel, got {how.expert_parallel}")
    if how.data_parallel == 1:
        first = share_of_first(spec, how.tensor_parallel, IN_ORDER if how.expert_parallel > 1 else None)
        return [replace(first, rank=rank) for rank in range(how.tensor_parallel)]
    if how.tensor_parallel > 1:
        raise ConfigError(f"data_parallel={how.data_parallel} needs tensor_parallel=1, got {how.tensor_parallel}")
    return [share_of_worker(spec, rank, how.data_parallel, IN_ORDER) for rank in range(how.data_parallel)]


def kv_formula(spec: ModelSpec, how: Parallelism) -> tuple[str, str]:
    """Bytes of a token's KV on one rank, as a product, of a sum where layers are unlike; and where it comes from. Of
    one model: what a draft keeps has a formula of its own."""
    kv, dtype = spec.kv, how.kv_stored_as
    item = "1 byte" if dtype in KV_DTYPES else f"{DTYPE_BYTES[dtype]} bytes"
    attention = spec.layers[0].attention
    if isinstance(attention, LatentSpec):
        numbers = f"({attention.kv_rank} latent + {attention.rope_dim} rotary key)"
        source = "num_hidden_layers, kv_lora_rank, qk_rope_head_dim; DeepSeek-V2, 2.1.3: every rank has all of it"
        return f"{kv.num_layers} layers x {numbers} x {item}", source
    of_shape = Counter(kv.layer_shapes) or {(kv.num_heads, kv.dim): kv.num_layers}
    sizes = {dim: _vector_size(dtype, dim) for _, dim in of_shape}
    terms = [
        f"{num_layers} layers x {max(heads // how.tensor_parallel, 1)} KV heads x {sizes[dim]}"
        for (heads, dim), num_layers in of_shape.items()
    ]
    numbers = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
    source = "num_hidden_layers, num_key_value_heads, head_dim; Ainslie et al. 2023: a rank has its heads"
    if len(terms) > 1:
        source += ", of each kind of layer"
    if kv.num_layers < spec.num_layers:
        source += f"; the other {spec.num_layers - kv.num_layers} layers read the KV of these"
    return f"2 (key, value) x {numbers} x {item}", source


def _vector_size(dtype: str, dim: int) -> str:
    """Formula of the elements that a vector of `dim` numbers takes."""
    if dtype not in KV_DTYPES:
        return str(dim)
    numbers = stored_size(dtype, dim)
    steps = "a scale" if is_scaled(dtype) else "scales and least numbers"
    return f"({numbers} + {vector_bytes(dtype, dim) - numbers} of {steps})"


def _by_part(fields: dict[str, int]) -> dict[str, int]:
    found = dict.fromkeys(PARTS, 0)
    for field, num_bytes in fields.items():
        found[_part_of(field)] += num_bytes
    return {part: num_bytes for part, num_bytes in found.items() if num_bytes}


def _part_of(field: str) -> str:
    """field: of LayerWeights or DecoderWeights."""
    if field in ("embed", "lm_head"):
        return "head" if field == "lm_head" else "embeddings"
    if field in ("token_embed", "token_mix"):
        return "embeddings"
    if "norm" in field or field == "scale":
        return "norms"
    if field.startswith(("gate_up", "down", "token")):
        return "MLP"
    return "experts" if field.startswith(("router", "choice", "expert", "shared")) else "attention"
