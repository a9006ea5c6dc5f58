"""The compiled passes of draft heads, against those that torch computes: KV, hidden states, logits, greedy drafts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.attention import unpack
from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.load import library
from diptych.workers.device.kv_cache import KVCache
from diptych.workers.execution.cpu.compiled_head import CompiledHead
from diptych.workers.kv.layout import DOT, ROWS
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.head_specs.head_config import read_head_spec
from diptych.workers.models.head_specs.head_limits import why_torch_head
from diptych.workers.models.heads.draft_head import DraftHead, SharedWeights
from diptych.workers.models.heads.loading import load_head
from diptych.workers.models.heads.passes import HostPasses, PassOutput, TorchPasses
from diptych.workers.models.heads.vocabulary_map import DraftVocabulary
from diptych.workers.models.layers.rope import rope_tables
from diptych.workers.models.layers.step import Step
from diptych.workers.models.plan.kv_plan import layout_of

from ....support.heads import SPECFORGE, SPECULATORS, eagle3_config, make_eagle3, make_mtp
from ...conftest import CheckpointOf

needs_kernels = pytest.mark.skipif(library() is None, reason="the kernels are not built")
CPU, BLOCK_SIZE, VOCAB, NUM_BLOCKS = torch.device("cpu"), 16, 500, 32
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# Of values of about 1; bfloat16 is rounded at other places, to 8 bits.
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 0.05, "atol": 0.08}}
QWEN3 = {"model_type": "qwen3", "attention_bias": True}
KINDS: dict[str, Callable[[Path, Path], Path]] = {
    "plain": lambda to, _: make_eagle3(to, eagle3_config(SPECFORGE), 1),
    "its target's embeddings": lambda to, _: make_eagle3(to, eagle3_config(SPECFORGE), 1, own_embed=False),
    "norm before residual": lambda to, _: make_eagle3(to, eagle3_config(SPECFORGE, norm_before_residual=True), 2),
    "one norm before fc": lambda to, _: make_eagle3(to, eagle3_config(SPECFORGE, norm_before_fc=True), 3),
    "norms before fc": lambda to, _: make_eagle3(to, eagle3_config(SPECULATORS, fc_norm=True), 4),
    "norm fed back": lambda to, _: make_eagle3(to, eagle3_config(SPECULATORS, norm_output=True), 5),
    "smaller": lambda to, _: make_eagle3(
        to, eagle3_config(SPECFORGE, layer={"hidden_size": 48}, target_hidden_size=64), 6
    ),
    "qwen3, three layers": lambda to, _: make_eagle3(
        to, eagle3_config(SPECULATORS, layer=QWEN3 | {"num_hidden_layers": 3}, norm_before_residual=True), 7
    ),
    "mtp": lambda to, target: make_mtp(to, target, "deepseek", 8, alone=True),
    "mtp, norm fed back": lambda to, target: make_mtp(to, target, "qwen3-next", 9, alone=True),
}


@dataclass(frozen=True)
class Side:
    passes: HostPasses
    cache: KVCache

    def kv(self, blocks: list[int], num_tokens: int) -> Tensor:
        """[layers, 2, tokens, heads, dim]: of the leading tokens in these blocks."""
        layers = [self.cache.layer(i)[blocks] for i in range(self.cache.layout.num_layers)]
        rows = [unpack(layer) if self.cache.layout.packing == DOT else layer for layer in layers]
        return torch.stack([layer.transpose(0, 1).flatten(1, 2)[:, :num_tokens] for layer in rows])


@dataclass(frozen=True)
class Pair:
    torch: Side
    compiled: Side
    aux_size: int
    vocabulary: DraftVocabulary
    to_target: Tensor | None
    tolerance: dict[str, float]

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.torch, self.compiled


def pair_of(folder: Path, target: Path, dtype: torch.dtype, team: Team) -> Pair:
    spec = load_spec(target)
    generator = torch.Generator().manual_seed(8)
    shared = SharedWeights(*(torch.randn(VOCAB, 64, generator=generator).to(dtype) / by for by in (1, 8)))
    head: DraftHead = load_head(folder, spec, shared, dtype, CPU)
    decoder = head.spec.decoder
    tables = rope_tables(decoder, 128, CPU)
    layouts = [layout_of(decoder, NAMES[dtype], BLOCK_SIZE, packing=packing) for packing in (ROWS, DOT)]
    caches = [KVCache(layout, NUM_BLOCKS, CPU) for layout in layouts]
    passes = TorchPasses(head, caches[0], tables), CompiledHead(team, head, caches[1], tables)
    to_target = head.parts.to_target
    vocabulary = DraftVocabulary(decoder.vocab_size, to_target)
    sides = (Side(of, cache) for of, cache in zip(passes, caches, strict=True))
    return Pair(*sides, head.spec.aux_size, vocabulary, to_target, TOLERANCE[dtype])


def step_of(starts: list[int], num_new: list[int], token_ids: list[int]) -> Step:
    """A step of sequences, of which sequence s has the blocks 5 s, 5 s + 1 and so on."""
    words = [np.array(of, dtype=np.int32) for of in (num_new, np.array(starts) + num_new, token_ids)]
    tables = np.arange(5 * len(starts), dtype=np.int32).reshape(-1, 5)
    return Step(words[0], words[1], tables, words[2], np.cumsum(words[0], dtype=np.int32) - 1)


def assert_close(pair: Pair, found: PassOutput, expected: PassOutput) -> None:
    torch.testing.assert_close(found.logits, expected.logits, **pair.tolerance)
    torch.testing.assert_close(found.hidden, expected.hidden, **pair.tolerance)


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.long), 2])
def team(request: pytest.FixtureRequest) -> Team:
    kernels = library()
    assert kernels is not None
    return Team(kernels, request.param)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_those_of_torch(kind: str, dtype: torch.dtype, llama: Path, tmp_path: Path, team: Team) -> None:
    pair = pair_of(KINDS[kind](tmp_path, llama), llama, dtype, team)
    generator = torch.Generator().manual_seed(3)

    def aux(num: int) -> Tensor:
        return torch.randn(num, pair.aux_size, generator=generator).to(dtype)

    starts, ids = [0, 0, 0], torch.arange(200) * 13 % VOCAB
    prompts = [17, 30, 9]
    given = aux(sum(prompts))
    for side in pair.sides:  # prompts, of which only the KV is wanted
        side.passes.store(step_of(starts, prompts, ids[: sum(prompts)].tolist()), given)
    for s, num in enumerate(prompts):
        blocks = [5 * s + i for i in range(5)]
        kept = [side.kv(blocks, num) for side in pair.sides]
        torch.testing.assert_close(kept[1], kept[0], **pair.tolerance)
    num_new, given = [1, 3, 6], aux(10)
    entering = step_of(prompts, num_new, ids[60:70].tolist())
    expected, found = (side.passes.first(entering, given) for side in pair.sides)
    assert_close(pair, found, expected)
    ends = [start + num for start, num in zip(prompts, num_new, strict=True)]
    for i in range(2):  # both are given the same, of two sequences alone
        hidden, token_ids = expected.hidden[:2].clone(), ids[80 + 2 * i : 82 + 2 * i].tolist()
        step = replace(step_of([end + i for end in ends][:2], [1, 1], token_ids))
        expected, found = (side.passes.further(step, hidden) for side in pair.sides)
        assert_close(pair, found, expected)
    for s, end in enumerate(ends):
        blocks = [5 * s + i for i in range(5)]
        kept = [side.kv(blocks, end + 2 * (s < 2)) for side in pair.sides]
        torch.testing.assert_close(kept[1], kept[0], **pair.tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "mtp"])
def test_drafts_at_once_are_those_of_single_passes(
    kind: str, dtype: torch.dtype, llama: Path, tmp_path: Path, team: Team
) -> None:
    """Tokens and KV to the bit; their chances to what a sum in another order gives."""
    folder = KINDS[kind](tmp_path, llama)
    at_once, single = (pair_of(folder, llama, dtype, team) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    num_new, depths = [14, 2, 5], [20, 3, 3]  # the first one's drafts cross into the next blocks
    aux = torch.randn(sum(num_new), at_once.aux_size, generator=generator).to(dtype)
    step = step_of([0, 0, 0], num_new, [7 * i % VOCAB for i in range(sum(num_new))])
    num_active = [sum(depth > i for depth in depths) for i in range(max(depths))]
    drafts = at_once.compiled.passes.greedy(step, aux, num_active)
    assert drafts is not None
    output = single.compiled.passes.first(step, aux)
    for i, num in enumerate(num_active):
        if i:
            hidden, last = output.hidden[:num].clone(), drafts.token_ids[i - 1][:num]
            starts = [new + i - 1 for new in num_new[:num]]
            output = single.compiled.passes.further(step_of(starts, [1] * num, last), hidden)
        logits = single.vocabulary.logits(output.logits)
        assert drafts.token_ids[i] == logits.argmax(dim=1).tolist()
        chances = logits.softmax(dim=1).amax(dim=1)
        torch.testing.assert_close(torch.tensor(drafts.chances[i]), chances, rtol=1e-4, atol=1e-6)
    for s, depth in enumerate(depths):
        blocks, num = [5 * s + i for i in range(5)], num_new[s] + depth - 1
        assert torch.equal(at_once.compiled.kv(blocks, num), single.compiled.kv(blocks, num))


def test_why_torch_computes_a_head(checkpoint_of: CheckpointOf, tmp_path: Path, llama: Path) -> None:
    def why(folder: Path, target: Path, block_size: int = 16, kv_dtype: str = "float32") -> str | None:
        return why_torch_head(read_head_spec(folder, load_spec(target)), block_size, kv_dtype)

    def eagle3(name: str, **layer: Any) -> Path:
        return make_eagle3(tmp_path / name, eagle3_config(SPECFORGE, layer=layer), 1)

    assert why(eagle3("fits"), llama) is None
    assert why(eagle3("dim", head_dim=24), llama) == "head_dim 24 is not a multiple of 16"
    assert why(eagle3("halves", head_dim=48), llama, kv_dtype="int4") == "head_dim 48 is not a multiple of 32"
    assert why(eagle3("blocks"), llama, block_size=8) == "block_size 8 is not a multiple of 16"
    for arch, reason in (("mixtral", "a mixture of experts"), ("deepseek-v3", "latent attention|mixture")):
        path = checkpoint_of(arch)
        found = why(make_mtp(tmp_path / arch, path, "deepseek", 1, alone=True), path)
        assert found is not None and any(part in found for part in reason.split("|"))
