"""A forward pass in pieces gives the same result as a whole one, and stores KV where layers require it."""

from dataclasses import replace
from pathlib import Path

import torch

from diptych.workers.device.kv_cache import KVCache
from diptych.workers.execution.gpu.forward import ForwardBuffers, ForwardPieces
from diptych.workers.models.checkpoint.weights import Checkpoint
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.layers.decoder import Decoder
from diptych.workers.models.layers.rope import rope_tables
from diptych.workers.models.plan.kv_plan import layout_of

from ....support.checkpoints import random_prompts
from ...models.layers.test_decoder import BLOCK_SIZE, CPU, prompt_step


def test_pieces_store_and_read_the_kv_that_layers_name(llama: Path) -> None:
    [prompt], block_table = random_prompts(5, [40]), [2, 0, 1]
    spec = load_spec(llama)
    whole, pieces = (KVCache(layout_of(spec, "float32", BLOCK_SIZE), 3, CPU) for _ in range(2))
    tokens, meta = torch.tensor(prompt), prompt_step(prompt, block_table, None).meta(rope_tables(spec, 40, CPU), 16)
    with Checkpoint(llama, spec) as checkpoint, torch.inference_mode():
        decoder = Decoder(spec, checkpoint.load(torch.float32, CPU))
        decoder.layers = [replace(layer, kv_id=spec.num_layers - 1 - layer.kv_id) for layer in decoder.layers]
        expected = decoder.forward(tokens, whole, meta)
        passing, by_pieces = (
            ForwardBuffers.passing(tokens, torch.cat(meta.cos_sin, dim=1), meta.slots),
            ForwardPieces(decoder, pieces),
        )
        for index in range(by_pieces.num_layers):
            by_pieces.compute(passing, index)
            by_pieces.attend(passing, index, meta.paged, len(prompt))
        by_pieces.compute(passing, by_pieces.num_layers)
    assert torch.equal(passing.hidden, expected)
    assert torch.equal(pieces.tensor, whole.tensor)
