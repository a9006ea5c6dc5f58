"""Time of a step on a GPU by the roofline model (Williams et al. 2009): products + attention + ranks + overhead.

    products    2 · weights used by each token, at the dense rate, or the bytes of those that the step touches, at the
                memory's, whichever takes longer: few tokens cost nothing while a step waits for its weights
    attention   4 · query size for each pair of tokens that attend, at the dense rate, or the KV that is read or
                written, at the memory's; of prompts, and of decodes
    ranks       two all-reduces a layer (Shoeybi et al. 2019, §3), in a ring, at the peers' rate

Weights and KV in few bits are fewer bytes, computed with at the rate of 16 bits, as the kernels here do. Only where
rows have 8 bits, too, are products twice as fast (docs/quantization.md: w8a8, and checkpoints made for rows of FP8).

Kernels run one after the other: what one waits for hides nothing of another. Rates are the datasheet's times an
efficiency. The defaults are round numbers near what serving engines reach on large matrices, not measurements of this
project.
"""

from dataclasses import dataclass, replace

from ...workers.costs.step_cost import StepWork
from ...workers.kv.dtypes import DTYPE_BYTES
from ...workers.models.families.spec import LatentSpec, LayerSpec, ModelSpec, MoeSpec
from ...workers.models.plan.kept_numbers import NONE, Layouts, quantises_rows
from ..preflight.memory_plan import Memory, MemoryPlan, Parallelism, plan_memory
from .gpus import Gpu

ALL_REDUCE_LATENCY_S = 10e-6
RATE_OF_8_BITS = 2.0  # beside that of 16, of int8 and FP8, on all GPUs of gpus.py that have it


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Parts of the datasheet's rates that are reached, and the time of a step beside them."""

    compute: float = 0.6
    memory: float = 0.75
    overhead_s: float = 0.001


@dataclass(frozen=True, slots=True)
class RooflineTimer:
    """Bytes are of one rank, at the memory's rate; operations likewise."""

    dense_bytes: float  # of weights that every step reads
    expert_bytes: float  # of all experts
    token_flops: float
    pair_flops: float
    kv_bytes: float  # of a token
    flops_s: float
    bytes_s: float
    reduce_token_s: float  # of a token, in all-reduces
    fixed_s: float
    expert_share: float = 0.0  # of the experts, that a token uses

    @classmethod
    def of(
        cls, spec: ModelSpec, how: Parallelism, gpu: Gpu, reached: Efficiency, layouts: Layouts = NONE
    ) -> "RooflineTimer":
        """`how`: one rank is one GPU. layouts: of weights that stay as they are stored."""
        ranks, item = how.tensor_parallel, DTYPE_BYTES[how.dtype]
        has = Memory(int(gpu.memory_bytes), 0.5)
        plan = plan_memory(spec, how, has, layouts=layouts)
        dense, experts = _multiplied(plan, is_read=spec.tie_word_embeddings and how.quantize is None)
        whole = plan_memory(spec, replace(how, quantize=None), has)
        all_dense, all_experts = _multiplied(whole, is_read=spec.tie_word_embeddings)
        has_rows_of_8_bits = quantises_rows(layouts, how.quantize, has_fp8=gpu.has_fp8)
        rate = RATE_OF_8_BITS if has_rows_of_8_bits else 1.0
        share = _expert_share(spec)
        reduce_bytes = 2 * spec.num_layers * spec.hidden_size * item * 2 * (ranks - 1) / ranks
        latency_s = 2 * spec.num_layers * ALL_REDUCE_LATENCY_S if ranks > 1 else 0.0
        return cls(
            dense_bytes=dense,
            expert_bytes=experts,
            token_flops=2 * (all_dense + all_experts * share) / item / rate,
            pair_flops=sum(map(_pair_flops, spec.layers)) / ranks,
            kv_bytes=plan.token_bytes,
            flops_s=gpu.flops_s * reached.compute,
            bytes_s=gpu.bytes_s * reached.memory,
            reduce_token_s=reduce_bytes / gpu.peer_bytes_s,
            fixed_s=reached.overhead_s + latency_s,
            expert_share=share,
        )

    def seconds(self, work: StepWork) -> float:
        num_tokens = work.num_decodes + work.num_prefill
        touched = 1 - (1 - self.expert_share) ** num_tokens if self.expert_bytes else 0.0
        weight_bytes = self.dense_bytes + self.expert_bytes * touched
        products_s = max(self.token_flops * num_tokens / self.flops_s, weight_bytes / self.bytes_s)
        pair_s, kv_s = self.pair_flops / self.flops_s, self.kv_bytes / self.bytes_s
        prompts_s = max(pair_s * work.num_pairs, kv_s * work.num_prefill)
        decodes_s = max(pair_s * work.num_context, kv_s * (work.num_context + work.num_decodes))
        return products_s + prompts_s + decodes_s + self.reduce_token_s * num_tokens + self.fixed_s


def kv_blocks(spec: ModelSpec, how: Parallelism, gpu: Gpu, fraction: float, layouts: Layouts = NONE) -> int:
    """Number of KV blocks of a worker. layouts: of weights that stay as they are stored. Raises ConfigError, and
    InsufficientMemory where the weights do not fit."""
    plan = plan_memory(spec, how, Memory(int(gpu.memory_bytes), fraction), layouts=layouts)
    return plan.num_tokens // how.block_size if plan.first.free_bytes > 0 else 0


def _multiplied(plan: MemoryPlan, *, is_read: bool) -> tuple[int, int]:
    """Bytes of the first rank's weights that rows are multiplied with: without experts, and of all experts. is_read:
    whether the embeddings are the head, too."""
    weights = plan.first.weights
    experts = weights.get("experts", 0)
    return plan.first.weight_bytes - experts - (0 if is_read else weights.get("embeddings", 0)), experts


def _expert_share(spec: ModelSpec) -> float:
    mixtures = [m for layer in spec.layers if isinstance(m := layer.feed_forward, MoeSpec)]
    return sum(m.routing.top_k / m.num_experts for m in mixtures) / len(mixtures) if mixtures else 0.0


def _pair_flops(layer: LayerSpec) -> float:
    """Operations of a layer for a token and one that it attends to: a product with its key, and one with its value."""
    attention = layer.attention
    if isinstance(attention, LatentSpec):
        return 2 * attention.num_heads * (2 * attention.kv_rank + attention.rope_dim)
    return 4 * attention.q_size
