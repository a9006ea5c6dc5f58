"""Multi-head latent attention (DeepSeek-V2, 2.1) of one decoder layer: project, store, attend.

    hidden ──qkv──> queries, or latents of them ──norm, q_b──> queries
             └────> a latent and a key; [norm(latent), rotated key] is what the cache holds of a token, for all heads

    expanded   keys and values are made of every latent of a context (kv_b), and the heads attend as in any model
    absorbed   what makes them is applied to the queries and to the outputs instead (appendix C): the heads attend over
               the latents as they are, which every one of them reads

Both are the same sum in another order. A decode is absorbed; a chunk of a prompt is what costs less (`expands`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ....kernels.attention.paged_batch import PagedBatch
from ....kernels.elementwise.rms_norm import rms_norm
from ....kernels.gemm.linear import linear
from ....kernels.mla.cudnn_latents import FEW
from ....kernels.mla.latent_attention import latent_attention
from ....kernels.mla.latent_kv_write import latent_kv_write
from ....kernels.mla.prefill import Chunks, mla_prefill
from ..checkpoint.weights import LayerWeights
from ..families.spec import LatentSpec

EXPANDED_BYTES = 256 << 20  # size of the keys and values that are expanded at once, for as many heads as fit


def project(
    spec: LatentSpec, weights: LayerWeights, hidden: Tensor, cache: Tensor, cos_sin: Tensor, slots: Tensor
) -> Tensor:
    """Stores the latents of the T tokens; returns their queries, [T, N, nope_dim + rope_dim], rotated.

    hidden: [T, H]; cache: [num_blocks, 1, block_size, 1, kv_rank + rope_dim]; cos_sin: [T, rope_dim] float32; slots:
    [T] int64, below 0: not stored. spec, weights: of this rank's heads.
    """
    assert weights.k_norm is not None
    mixed = linear(hidden, weights.qkv, weights.qkv_bias)
    q, latent, key = mixed.split((mixed.shape[1] - spec.kv_dim, spec.kv_rank, spec.rope_dim), dim=1)
    if weights.q_b is not None:
        assert weights.q_norm is not None
        q = linear(rms_norm(q, weights.q_norm, spec.norm_eps), weights.q_b)
    q = q.view(len(q), spec.num_heads, spec.q_dim)
    latent_kv_write(q, latent, key, weights.k_norm, spec.norm_eps, cos_sin, _latents(cache), slots)
    return q


def attend(spec: LatentSpec, weights: LayerWeights, q: Tensor, cache: Tensor, batch: PagedBatch) -> Tensor:
    """q, cache: as `project` gives and takes them, of all the batch's tokens, which are stored. Returns what each sees
    of its sequence, up to and with itself, [T, N, value_dim]."""
    out, start = q.new_empty(*q.shape[:2], spec.value_dim), 0
    for sequences, is_expanded in _parts(spec, batch):
        rows = slice(start, start + sum(batch.host_num_new[s] for s in sequences))
        form = expanded if is_expanded else absorbed
        out[rows] = form(spec, weights, q[rows], _latents(cache), batch, sequences)
        start = rows.stop
    return out


def _parts(spec: LatentSpec, batch: PagedBatch) -> Iterator[tuple[range, bool]]:
    """Sequences side by side that have one form, and whether that is the expanded one."""
    start, num = batch.num_decodes, len(batch.host_num_new)
    if start:
        yield range(start), False
    while start < num:
        forms = (expands(spec, batch.host_num_new[s], batch.host_context_lens[s]) for s in range(start, num))
        first = next(forms)
        end = next((s for s, form in enumerate(forms, start + 1) if form != first), num)
        yield range(start, end), first
        start = end


def expands(spec: LatentSpec, num_new: int, context_len: int) -> bool:
    """Return whether keys and values of all tokens cost fewer multiplications than queries and outputs by way of
    latents.

    Of each head, C tokens of context, T of them new, P pairs of which one sees the other:
        expanded   C rank (nope + value) + P (nope + rope + value)
        absorbed   T rank (nope + value) + P (2 rank + rope)
    """
    pairs = num_new * context_len - num_new * (num_new - 1) // 2
    per_head = spec.nope_dim + spec.value_dim
    return (context_len - num_new) * spec.kv_rank * per_head <= pairs * (2 * spec.kv_rank - per_head)


def expanded(
    spec: LatentSpec, weights: LayerWeights, q: Tensor, latents: Tensor, batch: PagedBatch, sequences: range
) -> Tensor:
    """q: [T, N, nope_dim + rope_dim], of the new tokens of these sequences, side by side; latents: [num_blocks,
    block_size, kv_rank + rope_dim]. Returns [T, N, value_dim]."""
    blocks, offsets, chunks = _contexts(batch, sequences)
    latent, rope = latents[blocks, offsets].split((spec.kv_rank, spec.rope_dim), dim=1)
    per_head = spec.nope_dim + spec.value_dim
    together = max(EXPANDED_BYTES // (len(latent) * per_head * latent.itemsize), 1)
    if FEW < together < spec.num_heads:  # of which cuDNN takes multiples
        together = 1 << (together.bit_length() - 1)
    assert weights.kv_b is not None
    parts: list[Tensor] = []
    for heads, kv_b in zip(q.split(together, dim=1), weights.kv_b.split(together * per_head), strict=True):
        both = linear(latent, kv_b).view(len(latent), -1, per_head)
        keys, values = both.split((spec.nope_dim, spec.value_dim), dim=2)
        parts.append(mla_prefill(heads, keys, rope, values, chunks, spec.scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _contexts(batch: PagedBatch, sequences: range) -> tuple[Tensor, Tensor, Chunks]:
    """Block and offset of every token that these sequences see, one after the other [C] int64; and what is new of them.
    Made once a step for all layers alike."""
    key = ("contexts", sequences)
    if key not in batch.plans:
        rows = slice(sequences.start, sequences.stop)
        lens, tables, new = batch.context_lens[rows].long(), batch.block_tables[rows], batch.host_num_new[rows]
        host_lens = batch.host_context_lens[rows]
        owner = torch.repeat_interleave(lens, output_size=sum(host_lens))
        position = torch.arange(len(owner), device=lens.device) - (lens.cumsum(0) - lens)[owner]
        blocks = tables[owner, position // batch.block_size].long()
        batch.plans[key] = blocks, position % batch.block_size, Chunks(new, host_lens, batch.latent_library)
    return batch.plans[key]


def absorbed(
    spec: LatentSpec, weights: LayerWeights, q: Tensor, latents: Tensor, batch: PagedBatch, sequences: range
) -> Tensor:
    """Compute what `expanded` does, by way of latents."""
    keys, values = _per_head(spec, weights)
    nope, rope = q.split((spec.nope_dim, spec.rope_dim), dim=2)
    queries = torch.bmm(nope.transpose(0, 1), keys).transpose(0, 1)
    attended = latent_attention(queries, rope, latents, batch, sequences, spec.scale)
    return torch.bmm(attended.transpose(0, 1), values.mT).transpose(0, 1)


def has_kernels(spec: LatentSpec) -> bool:
    """Return whether a GPU's kernels know latents and heads of such sizes."""
    sizes = spec.kv_rank, spec.nope_dim, spec.rope_dim, spec.value_dim
    return all(size >= 16 and size & (size - 1) == 0 for size in sizes)


def _per_head(spec: LatentSpec, weights: LayerWeights) -> tuple[Tensor, Tensor]:
    """Return the matrices that make keys of a latent, [N, nope_dim, kv_rank], and values, [N, value_dim, kv_rank]."""
    assert weights.kv_b is not None
    keys, values = weights.kv_b.view(spec.num_heads, -1, spec.kv_rank).split((spec.nope_dim, spec.value_dim), dim=1)
    return keys, values


def _latents(cache: Tensor) -> Tensor:
    """[num_blocks, 1, block_size, 1, kv_rank + rope_dim] -> without the axes of one."""
    return cache[:, 0, :, 0]
