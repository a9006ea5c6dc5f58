"""The twin against transformers' rotation, and where it writes. (Triton against the twin: test_triton.py.)"""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from diptych.kernels.kv.rope_kv_write import rope_kv_write


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_rotates_and_writes_to_its_slots_alone(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads, dim, block_size = 6, 2, 12, 4
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, dim, generator=generator)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    angles = torch.rand(num_tokens, dim // 2, generator=generator) * 100
    cache = torch.full((5, 3, 2, block_size, num_kv_heads, dim), torch.nan)
    slots = torch.randperm(5 * block_size, generator=generator)[:num_tokens]
    out = rope_kv_write(q, k, v, torch.cat((angles.cos(), angles.sin()), dim=1), cache[:, 1], slots)

    cos, sin = (torch.cat((x, x), dim=1)[None] for x in (angles.cos(), angles.sin()))
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(out, expected_q[0].transpose(0, 1))
    blocks, offsets = slots // block_size, slots % block_size
    torch.testing.assert_close(cache[blocks, 1, 0, offsets], expected_k[0].transpose(0, 1))
    assert torch.equal(cache[blocks, 1, 1, offsets], v)
    cache[blocks, 1, :, offsets] = torch.nan
    assert cache.isnan().all()
