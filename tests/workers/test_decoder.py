"""The decoder's logits at every prompt position against transformers'."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diptych.kernels.paged_batch import PagedBatch
from diptych.workers.kv_cache import KVCache
from diptych.workers.kv_layout import KVLayout
from diptych.workers.models.attention import StepMeta
from diptych.workers.models.decoder import Decoder
from diptych.workers.models.families import load_spec
from diptych.workers.models.rope import rope_tables
from diptych.workers.models.weights import Checkpoint

from ..checkpoints import ARCHITECTURES, random_prompts, reference_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def prompt_logits(path: Path, prompt: list[int], block_table: list[int]) -> torch.Tensor:
    """[T, vocab]: the whole prompt in one chunk, its KV in the blocks named."""
    spec = load_spec(path)
    with Checkpoint(path, spec) as checkpoint:
        decoder = Decoder(spec, checkpoint.load(torch.float32, CPU))
    layout = KVLayout("float32", BLOCK_SIZE, spec.num_layers, spec.kv.num_heads, spec.kv.dim, "test")
    cache = KVCache(layout, max(block_table) + 1, CPU)
    cache.tensor.fill_(torch.nan)  # nothing may depend on what blocks held before
    num = len(prompt)
    positions = torch.arange(num)
    blocks = torch.tensor(block_table)
    paged = PagedBatch(
        block_tables=blocks.int()[None],
        context_lens=torch.tensor([num], dtype=torch.int32),
        query_starts=torch.tensor([0, num], dtype=torch.int32),
        host_context_lens=[num],
        host_num_new=[num],
        num_decodes=int(num == 1),
        block_size=BLOCK_SIZE,
    )
    slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    meta = StepMeta(rope_tables(spec, num, CPU), slots, paged)
    with torch.inference_mode():
        return decoder.logits(decoder.forward(torch.tensor(prompt), cache, meta))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("length", [1, 16, 17, 300])
def test_prompt_logits_equal_transformers(arch: str, length: int, family: Callable[[str], Path]) -> None:
    path = family(arch)
    [prompt] = random_prompts(length, [length])
    block_table = list(range(-(-length // BLOCK_SIZE), 0, -1))
    with torch.inference_mode():
        expected = reference_model(path)(torch.tensor([prompt])).logits[0]
    found = prompt_logits(path, prompt, block_table)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
