"""Quantised checkpoints, as published, served by real workers: tokens are those of transformers on what their numbers
mean, with a prefill worker of two ranks and a decode worker of one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ..support.checkpoints import make_checkpoint, untied_prompts
from ..support.harness import assert_nothing_leaked, unlike_workers
from ..workers.models.gguf.gguf_writer import write_gguf
from ..workers.models.quant.writers import compressed_tensors, gptq, quantised, w8a8
from ..workers.quantize.written import decoded_by_library, number_tokenizer, text_file, write
from .test_tensor_parallel import FLAGS, LENGTHS, NUM_TOKENS, answer, routed

ZEROS = compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False)
MXFP4 = compressed_tensors("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
# Decoded, and computed in their numbers; experts cut in slices, and whole ones, which torch computes.
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama, activations' order": ("llama", gptq(4, 16, ordered=False), {}),
    "llama, mxfp4": ("llama", MXFP4, {}),
    "qwen3moe, zero points": ("qwen3moe", ZEROS, {}),
    "qwen3moe, expert_parallel": ("qwen3moe", ZEROS, {"expert_parallel": 2}),
    "qwen3moe, on devices": ("qwen3moe", ZEROS, {"expert_parallel": 2, "device": "fake", "max_running": 8}),
}
GGUF: dict[str, dict[str, Any]] = {"llama": {}, "qwen3moe": {"norm_topk_prob": True, "mlp_only_layers": []}}

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "name", [*list(CASES)[:3], pytest.param(list(CASES)[3], marks=pytest.mark.long), list(CASES)[4]]
)
async def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    arch, written, flags = CASES[name]
    await check(*quantised(make_checkpoint(tmp_path / "source", arch, 6), tmp_path, *written), flags)


@pytest.mark.parametrize("arch", [pytest.param("llama", marks=pytest.mark.long), "qwen3moe"])
async def test_tokens_of_a_gguf_file(arch: str, tmp_path: Path) -> None:
    """A dense model as a file, and a mixture as a folder that holds one."""
    path, plain = write_gguf(make_checkpoint(tmp_path / "source", arch, 6, **GGUF[arch]), tmp_path)
    if arch != "llama":
        (tmp_path / "alone").mkdir()
        path = path.rename(tmp_path / "alone" / path.name).parent
    await check(path, plain)


async def test_what_diptych_writes_is_what_it_serves(tmp_path: Path) -> None:
    """By GPTQ; compressed-tensors says what its numbers mean."""
    source = make_checkpoint(tmp_path / "source", "llama", 6)
    number_tokenizer(source)
    text, out = text_file(tmp_path / "text.txt"), tmp_path / "out"
    write(source, out, "int4", calibrate=str(text), samples=8, sequence_tokens=64)
    (out / "tokenizer.json").unlink()  # a checkpoint of these tests has none
    await check(out, decoded_by_library(out, tmp_path / "plain"))


async def test_rows_that_are_quantised(tmp_path: Path) -> None:
    """Two workers give the tokens of one."""
    packed, plain = quantised(make_checkpoint(tmp_path / "source", "llama", 6), tmp_path, *w8a8())
    prompts = [prompt for prompt, _ in untied_prompts(plain, seed=31, lengths=LENGTHS, max_tokens=NUM_TOKENS)]
    found: list[list[list[int]]] = []
    for roles in (["mixed"], ["prefill", "decode"]):
        with unlike_workers(packed, [(role, FLAGS) for role in roles]) as handles:
            async with routed(*handles) as router:
                found.append(await asyncio.gather(*(answer(router, prompt, b"") for prompt in prompts)))
    assert found[0] == found[1]


async def check(packed: Path, plain: Path, flags: dict[str, Any] | None = None) -> None:
    """Serve `packed` on unlike workers; `plain` has the weights that its numbers mean."""
    cases = untied_prompts(plain, seed=31, lengths=LENGTHS, max_tokens=NUM_TOKENS)
    each = [("prefill", FLAGS | {"tensor_parallel": 2} | (flags or {})), ("decode", FLAGS)]
    with unlike_workers(packed, each) as handles:
        async with routed(*handles) as router:
            calls = [answer(router, prompt, b"") for prompt, _ in cases]
            assert await asyncio.gather(*calls) == [tokens for _, tokens in cases]
        assert handles[1].settled_state().load.num_handoffs_received == len(cases)
        assert_nothing_leaked(handles)
