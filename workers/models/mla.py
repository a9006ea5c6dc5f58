"""Multi-head latent attention (DeepSeek-V2, 2.1) of one decoder layer: project, store, attend.

    hidden ──qkv──> queries, or latents of them ──norm, q_b──> queries
             └────> a latent and a key; [norm(latent), rotated key] is what the cache holds of a token, for all heads

    expanded   keys and values are made of every latent of a context (kv_b), and the heads attend as in any model
    absorbed   what makes them is applied to the queries and to the outputs instead (appendix C): the heads attend over
               the latents as they are, which every one of them reads

Both are the same sum in another order. A decode is absorbed; a chunk of a prompt is what costs less (`expands`).
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from ...kernels.paged_batch import PagedBatch
from ...kernels.rms_norm import rms_norm
from ...kernels.rope_kv_write import rotate
from .spec import LatentSpec
from .weights import LayerWeights

TOGETHER_BYTES = 24 << 20  # of contexts gathered at once: beyond, it is the memory that they wait for


def latent_attention(
    spec: LatentSpec,
    weights: LayerWeights,
    hidden: Tensor,
    cache: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    batch: PagedBatch,
) -> Tensor:
    """Stores the latents of the T tokens, and attends over each one's sequence, up to and with itself. On CPU.

    hidden: [T, H]; cache: [num_blocks, 1, block_size, 1, kv_rank + rope_dim]; cos_sin: [T, rope_dim] float32; slots:
    [T] int64. spec, weights: of this rank's heads. Returns [T, N, value_dim].
    """
    latents = cache[:, 0, :, 0]
    q = project(spec, weights, hidden, latents, cos_sin, slots)
    num_decodes = batch.num_decodes
    out = q.new_empty(*q.shape[:2], spec.value_dim)
    if num_decodes:
        out[:num_decodes] = decode(spec, weights, q[:num_decodes], latents, batch)
    start = num_decodes
    for s in range(num_decodes, len(batch.host_num_new)):
        num_new, context = batch.host_num_new[s], _context(latents, batch, s)
        attend = expanded if expands(spec, num_new, len(context)) else absorbed
        out[start : start + num_new] = attend(spec, weights, q[start : start + num_new], context)
        start += num_new
    return out


def project(
    spec: LatentSpec, weights: LayerWeights, hidden: Tensor, latents: Tensor, cos_sin: Tensor, slots: Tensor
) -> Tensor:
    """Returns the queries of the T tokens, [T, N, nope_dim + rope_dim], rotated; their latents are stored.

    latents: [num_blocks, block_size, kv_rank + rope_dim].
    """
    assert weights.k_norm is not None
    mixed = linear(hidden, weights.qkv, weights.qkv_bias)
    q, latent, key = mixed.split((mixed.shape[1] - spec.kv_dim, spec.kv_rank, spec.rope_dim), dim=1)
    if weights.q_b is not None:
        assert weights.q_norm is not None
        q = linear(rms_norm(q, weights.q_norm, spec.norm_eps), weights.q_b)
    stored = torch.cat((rms_norm(latent, weights.k_norm, spec.norm_eps), rotate(key[:, None], cos_sin)[:, 0]), dim=1)
    latents[slots // latents.shape[1], slots % latents.shape[1]] = stored
    nope, rope = q.view(len(q), spec.num_heads, -1).split((spec.nope_dim, spec.rope_dim), dim=2)
    return torch.cat((nope, rotate(rope, cos_sin)), dim=2)


def expands(spec: LatentSpec, num_new: int, context_len: int) -> bool:
    """Whether keys and values of all tokens cost fewer multiplications than queries and outputs by way of latents.

    Of each head, C tokens of context, T of them new, P pairs of which one sees the other:
        expanded   C rank (nope + value) + P (nope + rope + value)
        absorbed   T rank (nope + value) + P (2 rank + rope)
    """
    pairs = num_new * context_len - num_new * (num_new - 1) // 2
    per_head = spec.nope_dim + spec.value_dim
    return (context_len - num_new) * spec.kv_rank * per_head <= pairs * (2 * spec.kv_rank - per_head)


def expanded(spec: LatentSpec, weights: LayerWeights, q: Tensor, context: Tensor) -> Tensor:
    """q: [T, N, nope_dim + rope_dim], of the last T tokens of `context` [C, kv_rank + rope_dim]. Returns [T, N,
    value_dim]."""
    assert weights.kv_b is not None
    latent, rope = context.split((spec.kv_rank, spec.rope_dim), dim=1)
    both = linear(latent, weights.kv_b).view(len(context), spec.num_heads, -1)
    keys = torch.cat((both[..., : spec.nope_dim], rope[:, None].expand(-1, spec.num_heads, -1)), dim=2)
    return _chunk(q, keys, both[..., spec.nope_dim :], spec.scale)


def absorbed(spec: LatentSpec, weights: LayerWeights, q: Tensor, context: Tensor) -> Tensor:
    """As `expanded`."""
    seen = context[:, None].expand(-1, spec.num_heads, -1)
    attended = _chunk(_into_latents(spec, weights, q), seen, seen, spec.scale)
    return _out_of_latents(spec, weights, attended[..., : spec.kv_rank])


def decode(spec: LatentSpec, weights: LayerWeights, q: Tensor, latents: Tensor, batch: PagedBatch) -> Tensor:
    """q: [S, N, nope_dim + rope_dim], of the sequences with one new token. Gathers all contexts, padded to the
    longest; one by one where together they would not stay in the processor's cache. Returns [S, N, value_dim]."""
    queries, num_seqs = _into_latents(spec, weights, q), len(q)
    longest = max(batch.host_context_lens[:num_seqs])
    if num_seqs * longest * spec.kv_dim * latents.itemsize > TOGETHER_BYTES:
        each = (_over(spec, queries[s : s + 1], _context(latents, batch, s)[None]) for s in range(num_seqs))
        return _out_of_latents(spec, weights, torch.cat(list(each)))
    bias, padding = batch.decode_padding
    rows = latents.index_select(0, batch.decode_blocks).flatten(0, 1)
    # What lies beyond a context may be anything, even NaN, and NaN survives a weight of zero.
    contexts = rows.index_fill_(0, padding, 0).view(num_seqs, -1, spec.kv_dim)
    return _out_of_latents(spec, weights, _over(spec, queries, contexts, bias))


def _over(spec: LatentSpec, queries: Tensor, contexts: Tensor, bias: Tensor | None = None) -> Tensor:
    """queries: [S, N, D]; contexts: [S, L, D]; bias: [S, 1, 1, L]. Returns sums of latents, [S, N, kv_rank].

    The heads are the rows of one small matrix: what they share is read once. Values are as wide as keys, and what is
    no value is cut off: torch's fused attention takes no others.
    """
    seen, mask = contexts[:, None], None if bias is None else bias.to(queries.dtype)
    out = scaled_dot_product_attention(queries[:, None], seen, seen, attn_mask=mask, scale=spec.scale)
    return out[:, 0, :, : spec.kv_rank]


def _context(latents: Tensor, batch: PagedBatch, s: int) -> Tensor:
    """Of sequence s, [context, kv_dim]."""
    context_len = batch.host_context_lens[s]
    blocks = batch.block_tables[s, : -(-context_len // batch.block_size)]
    return latents.index_select(0, blocks).flatten(0, 1)[:context_len]


def _chunk(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """q: [T, N, D], of the last T of C tokens; keys: [C, N, D]; values: [C, N, V]. Returns [T, N, V]."""
    num_new, context_len, dim = len(q), len(keys), values.shape[2]
    mask = None
    if num_new < context_len:
        mask = torch.ones(num_new, context_len, dtype=torch.bool).tril_(context_len - num_new)
    if dim < q.shape[2]:  # as in `_over`
        values = pad(values, (0, q.shape[2] - dim))
    rows = (of.transpose(0, 1)[None] for of in (q, keys, values))
    out = scaled_dot_product_attention(*rows, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[0].transpose(0, 1)[..., :dim]


def _into_latents(spec: LatentSpec, weights: LayerWeights, q: Tensor) -> Tensor:
    """q: [T, N, nope_dim + rope_dim] -> what has the same products with latents, [T, N, kv_rank + rope_dim]."""
    keys, _ = _per_head(spec, weights)
    nope, rope = q.split((spec.nope_dim, spec.rope_dim), dim=2)
    return torch.cat((torch.bmm(nope.transpose(0, 1), keys).transpose(0, 1), rope), dim=2)


def _out_of_latents(spec: LatentSpec, weights: LayerWeights, attended: Tensor) -> Tensor:
    """attended: [T, N, kv_rank], sums of latents -> of values, [T, N, value_dim]."""
    _, values = _per_head(spec, weights)
    return torch.bmm(attended.transpose(0, 1), values.mT).transpose(0, 1)


def _per_head(spec: LatentSpec, weights: LayerWeights) -> tuple[Tensor, Tensor]:
    """What makes keys of a latent, [N, nope_dim, kv_rank], and values, [N, value_dim, kv_rank]."""
    assert weights.kv_b is not None
    keys, values = weights.kv_b.view(spec.num_heads, -1, spec.kv_rank).split((spec.nope_dim, spec.value_dim), dim=1)
    return keys, values
