"""Gemma 4 in bfloat16 rounds at the same places as transformers: embeddings, per-token inputs, a layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from diptych.workers.device.kv_cache import KVCache
from diptych.workers.models.checkpoint.weights import Checkpoint
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.layers.decoder import Decoder
from diptych.workers.models.layers.layer import LayerRows, run_layers
from diptych.workers.models.layers.rope import rope_tables
from diptych.workers.models.plan.kv_plan import layout_of

from ....support.checkpoints import make_checkpoint, random_prompts
from .test_decoder import BLOCK_SIZE, CPU, prompt_step

NUM_TOKENS = 70
[PROMPT] = random_prompts(3, [NUM_TOKENS])
TOKENS = torch.tensor(PROMPT)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Gemma 4, stored in bfloat16, whose scales of embeddings are no numbers of bfloat16."""
    path = make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "gemma4", "gemma4", seed=4, hidden_size=96)
    file = path / "model.safetensors"
    stored = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    return path


def both(path: Path, dtype: torch.dtype) -> tuple[Decoder, Any]:
    """Ours and transformers'."""
    with Checkpoint(path, load_spec(path)) as checkpoint:
        decoder = Decoder(checkpoint.spec, checkpoint.load(dtype, CPU))
    return decoder, AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().model


def first_layer(decoder: Decoder) -> Tensor:
    """[T, H], the layer's output."""
    spec, block_table = decoder.spec, list(range(-(-NUM_TOKENS // BLOCK_SIZE)))
    cache = KVCache(layout_of(spec, "bfloat16", BLOCK_SIZE), len(block_table), CPU)
    meta = prompt_step(PROMPT, block_table, None).meta(rope_tables(spec, NUM_TOKENS, CPU), BLOCK_SIZE)
    residual = decoder.embed(TOKENS)
    given = decoder.token_inputs(TOKENS, residual)
    assert run_layers(decoder.layers[:1], LayerRows(residual, meta, given), cache, decoder.group).hidden is None
    return residual


def first_layer_of_reference(model: Any) -> Tensor:
    found: list[Tensor] = []
    hook = model.layers[0].register_forward_hook(lambda _module, _inputs, output: found.append(output[0].clone()))
    model(TOKENS[None], use_cache=False)
    hook.remove()
    return found[0]


def test_what_enters_has_the_same_bits(rounded: Path) -> None:
    decoder, reference = both(rounded, torch.bfloat16)
    with torch.inference_mode():
        embedded, expected = decoder.embed(TOKENS), reference.embed_tokens(TOKENS)
        assert torch.equal(embedded, expected)
        given = decoder.token_inputs(TOKENS, embedded)
        assert given is not None
        looked_up = reference.get_per_layer_inputs(TOKENS[None])
        [expected] = reference.project_per_layer_inputs(expected[None], looked_up)
    assert given.dtype == torch.bfloat16
    assert (given != expected).float().mean() < 0.001  # but for sums that another shape may round otherwise


def test_a_layer_is_no_further_from_float32(rounded: Path) -> None:
    decoder, reference = both(rounded, torch.bfloat16)
    _, exact = both(rounded, torch.float32)
    with torch.inference_mode():
        expected = first_layer_of_reference(exact)
        found = first_layer(decoder), first_layer_of_reference(reference)
        ours, theirs = ((of.float() - expected).norm() / expected.norm() for of in found)
    assert ours < 1.1 * theirs < 0.02
