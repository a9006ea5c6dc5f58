"""The compiled decoder: what depends on nothing but a sequence itself, bit for bit; ranks; and who watches layers."""

import os
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.layer import PARTS
from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.load import library
from diptych.workers.common.request import SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.runner import LayerWatch
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.device.kv_cache import KVCache
from diptych.workers.execution.cpu.compiled import CompiledDecoder, read_weights
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.layout import DOT, KVLayout
from diptych.workers.models.checkpoint.weights import Checkpoint
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.layers.hidden_states import HiddenStates
from diptych.workers.models.layers.rope import rope_tables
from diptych.workers.models.layers.step import Step
from diptych.workers.models.plan.sharding import Share, spec_of
from diptych.workers.parallel.groups import Alone, Group

from ....support.checkpoints import make_checkpoint, random_prompts, reference_model
from ....support.serving import Server
from ...parallel.test_groups import as_ranks

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not built")
BLOCK_SIZE = 16
CPU = torch.device("cpu")
Tops = list[list[tuple[int, tuple[tuple[int, float], ...]]]]


def tops(runner: ModelRunner, prompts: SequenceOf[SequenceOf[int]], **changes: int) -> Tops:
    """Of each prompt, each generated token and the likeliest ones with their log-probabilities."""
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=5)
    server = Server(runner, SchedulerConfig(**changes), prefix_cache=False)
    return [[(t.token_id, t.top) for t in tokens] for tokens in server.generate(prompts, [sampling] * len(prompts))]


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_the_same_bits_alone_and_batched_and_chunked_and_threaded(arch: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(arch)
    prompts = random_prompts(3, [1, 14, 44, 290, 604])  # three go on into another block
    expected: Tops | None = None
    for num_threads in (1, 2):
        config = WorkerConfig.of(path, max_context_tokens=1024, threads=num_threads, kv_memory_bytes=32 << 20)
        runner = ModelRunner.load(config)
        alone = [tops(runner, [prompt])[0] for prompt in prompts]
        expected = expected or alone
        assert alone == expected
        assert tops(runner, prompts) == expected
        assert tops(runner, prompts[::-1], chunk_tokens=48)[::-1] == expected
        assert tops(runner, prompts[:4], chunk_tokens=7, max_batch_tokens=30) == expected[:4]
        runner.close()


@dataclass
class Rank:
    """One rank's decoder with a cache over its part of the pool."""

    decoder: CompiledDecoder
    cache: KVCache

    @classmethod
    def of(cls, path: Path, group: Group, memory_fd: int | None = None) -> "Rank":
        spec, share = load_spec(path), Share(group.rank, group.size)
        sizes = BLOCK_SIZE, spec.num_layers, spec.kv.num_heads, spec.kv.dim
        layout = KVLayout("float32", *sizes, "test", tensor_parallel=group.size, packing=DOT)
        cache = KVCache(layout, 32, CPU, rank=group.rank, shared=memory_fd)
        found = library()
        assert found is not None
        team = Team(found, 1 if group.size > 1 else 2)
        with Checkpoint(path, spec) as checkpoint:
            weights = read_weights(team, checkpoint.reader(torch.float32, CPU, share=share))
        cos_sin = rope_tables(spec, 512, CPU)
        return cls(CompiledDecoder(spec_of(spec, share), weights, cache, cos_sin, team, group), cache)

    def logits(self, token_ids: SequenceOf[int], step: Step, watch: LayerWatch | None = None) -> Tensor:
        """Of the last token of each sequence."""
        self.compute(token_ids, step, watch, picks=False)
        return self.decoder.logits(len(step.num_new)).clone()

    def picked(self, token_ids: SequenceOf[int], step: Step) -> list[int]:
        """The likeliest token after each sequence."""
        self.compute(token_ids, step, None, picks=True)
        return self.decoder.picked(len(step.num_new))

    def compute(self, token_ids: SequenceOf[int], step: Step, watch: LayerWatch | None, *, picks: bool) -> None:
        memory = self.decoder.memory
        memory.begin(step.num_new, step.context_lens, step.num_tokens, step.tables.shape[1])
        memory.set_tables(step.tables, np.arange(len(step.num_new)))
        memory.token_ids[: len(token_ids)] = token_ids
        memory.sampled[: len(step.num_new)] = np.cumsum(step.num_new) - 1
        self.decoder.step(len(step.num_new), watch, picks=picks, reads_all=step.reads_all)


@pytest.fixture
def memory_fd() -> Iterator[int]:
    """KV of ranks."""
    fd = os.memfd_create("test-kv")
    yield fd
    os.close(fd)


def two_prompts() -> tuple[list[int], Step]:
    """Of 40 and 21 tokens."""
    first, second = random_prompts(8, [40, 21])
    lens, tables = np.array([40, 21], dtype=np.int32), np.array([[5, 9, 2], [7, 1, 0]], dtype=np.int32)
    token_ids = first + second
    return token_ids, Step(lens, lens, tables, np.array(token_ids, dtype=np.int32), np.array([39, 60], dtype=np.int32))


@pytest.mark.parametrize(
    ("arch", "size", "changes"),
    [
        ("llama", 2, {"attention_bias": True, "vocab_size": 501}),
        ("qwen3", 4, {"vocab_size": 502, "tie_word_embeddings": True}),
        ("qwen2", 2, {}),
        ("mistral", 4, {"num_key_value_heads": 4}),
    ],
)
def test_ranks_together_compute_what_one_does(
    tmp_path: Path, memory_fd: int, arch: str, size: int, changes: dict[str, Any]
) -> None:
    """Also where their parts of the vocabulary are not equal."""
    path = make_checkpoint(tmp_path / arch, arch, 4, **({"num_key_value_heads": 2} | changes))
    token_ids, step = two_prompts()
    expected = Rank.of(path, Alone()).logits(token_ids, step)

    def work(group: Group) -> Tensor | None:
        rank = Rank.of(path, group, memory_fd)
        if group.rank == 0:
            logits = rank.logits(token_ids, step)
            assert rank.picked(token_ids, step) == logits.argmax(dim=-1).tolist()
            return logits
        rank.decoder.follow(step)
        rank.decoder.follow(replace(step, picks=True))
        return None

    found = as_ranks(size, tmp_path / "rendezvous", work)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_ranks_meet_after_a_step_of_which_nothing_is_sampled(llama: Path, memory_fd: int, tmp_path: Path) -> None:
    """Rank 0 reports it as computed: the others have stored its KV by then."""
    _, step = two_prompts()
    step = replace(step, sampled=step.sampled[:0])

    def work(group: Group) -> list[bool]:
        rank, meet, has_stored = Rank.of(llama, group, memory_fd), group.meet, list[bool]()

        def meeting() -> None:
            has_stored.append(bool(rank.cache.layer(rank.cache.layout.num_layers - 1).any()))
            meet()

        group.meet = meeting  # type: ignore[method-assign]
        rank.decoder.follow(step)
        assert rank.decoder.memory.struct.num_rows == 0
        return has_stored

    assert as_ranks(2, tmp_path / "rendezvous", work) == [[True, True]] * 2


@pytest.mark.parametrize("arch", ["llama", "mixtral", "gemma2", "gemma3", "olmo2"])
@pytest.mark.parametrize("sampled", [[0, 1, 41, 62], [1, 41], [35, 41], [], [40, 41, 62]])
def test_the_last_layer_computes_sampled_rows_alone_by_the_same_bits(
    tmp_path: Path, arch: str, sampled: list[int]
) -> None:
    """Two decodes and prompts of 40 and 21 tokens, of which only some are sampled, also in the midst of one."""
    rank = Rank.of(make_checkpoint(tmp_path / arch, arch, 4), Alone())
    prompts, layers = random_prompts(8, [1, 1, 40, 21]), rank.cache.layout.num_layers
    num_new = np.array([1, 1, 40, 21], dtype=np.int32)
    tables = np.array([[5, 9, 2], [7, 1, 0], [8, 3, 4], [6, 10, 0]], dtype=np.int32)
    token_ids, rows = (np.array(of, dtype=np.int32) for of in ([*chain(*prompts)], sampled))
    step = Step(num_new, np.array([33, 17, 40, 30], dtype=np.int32), tables, token_ids, rows)
    found: list[list[Tensor]] = []
    for reads_all in (True, False):
        rank.cache.tensor.zero_()
        num_sampled = rank.decoder.take(step)
        rank.decoder.step(num_sampled, reads_all=reads_all)
        assert rank.decoder.memory.struct.num_rows == (63 if reads_all else len(sampled))
        found.append([rank.cache.layer(i).clone() for i in range(layers)])
        found[-1] += [rank.decoder.logits(num_sampled).clone()] if sampled else []
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_whoever_watches_hears_when_layers_have_stored_their_kv(llama: Path) -> None:
    rank = Rank.of(llama, Alone())
    token_ids, step = two_prompts()
    expected = rank.logits(token_ids, step)
    whole = [rank.cache.layer(i).clone() for i in range(3)]
    rank.cache.tensor.zero_()
    heard: list[int] = []

    def reached(num_layers: int) -> None:
        heard.append(num_layers)
        for i in range(3):
            assert torch.equal(rank.cache.layer(i), whole[i]) == (i < num_layers)

    assert torch.equal(rank.logits(token_ids, step, LayerWatch((1, 3), reached)), expected)
    assert heard == [1, 3]


def test_the_likeliest_tokens_are_picked_without_their_logits(llama: Path) -> None:
    rank = Rank.of(llama, Alone())
    memory, (token_ids, step) = rank.decoder.memory, two_prompts()
    expected = rank.logits(token_ids, step)
    memory.logits.fill_(torch.nan)
    assert rank.picked(token_ids, step) == expected.argmax(dim=-1).tolist()
    assert memory.logits.isnan().all()
    one = Step(step.num_new[:1], step.context_lens[:1], step.tables[:1], step.token_ids[:40], step.sampled[:1])
    assert rank.picked(token_ids[:40], one) == expected[:1].argmax(dim=-1).tolist()
    assert torch.equal(rank.logits(token_ids, step), expected)


def test_picked_tokens_are_those_of_the_logits(llama: Path) -> None:
    runner = ModelRunner.load(WorkerConfig.of(llama, max_context_tokens=512, kv_memory_bytes=8 << 20))
    prompts = random_prompts(5, [3, 17, 40, 9, 130])
    server, plain = Server(runner, SchedulerConfig(), prefix_cache=False), SamplingParams(temperature=0.0, max_tokens=9)
    found: list[list[list[int]]] = []
    for asked in ([plain] * 5, [replace(plain, logprobs=0)] * 5, [plain, replace(plain, logprobs=0)] * 2 + [plain]):
        found.append([[t.token_id for t in tokens] for tokens in server.generate(prompts, asked)])
    runner.close()
    assert found[0] == found[1] == found[2]


def test_parts_of_a_step_are_timed_when_asked(llama: Path) -> None:
    rank = Rank.of(llama, Alone())
    token_ids, step = two_prompts()
    rank.logits(token_ids, step)
    profile = rank.decoder.memory.profile()
    assert not profile.any()
    rank.logits(token_ids, step)
    assert {part for part, taken in zip(PARTS, profile.tolist(), strict=True) if taken <= 0} == {"router"}


def test_rows_that_are_whole_kilobytes_lie_apart_and_change_nothing(tmp_path: Path) -> None:
    """Of 1, 2 and 3 KB: StepMemory gives each a cache line more."""
    path = make_checkpoint(
        tmp_path / "llama", "llama", 6, hidden_size=256, num_attention_heads=32, intermediate_size=768
    )
    rank = Rank.of(path, Alone())
    token_ids, step = two_prompts()
    found = rank.logits(token_ids, step)
    struct = rank.decoder.memory.struct
    assert (struct.normed_stride, struct.attended_stride, struct.inner_stride) == (256 + 16, 512 + 16, 768 + 16)
    assert rank.picked(token_ids, step) == found.argmax(dim=-1).tolist()
    model = reference_model(path)
    for i, ids in enumerate((token_ids[:40], token_ids[40:])):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(found[i], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kinds", [((0, 2, 3), False), ((1,), False), ((), True)], ids=["three", "one", "final"])
@pytest.mark.parametrize("num_new", [[1], [1, 1, 40]])
def test_hidden_states_are_those_between_calls(
    llama: Path, kinds: tuple[tuple[int, ...], bool], num_new: list[int]
) -> None:
    """A step that writes them itself leaves what is read after pieces of its layers, of all rows, and the same logits;
    those of the step before stay."""
    layers, is_final = kinds
    by_kernel, by_pieces = Rank.of(llama, Alone()), Rank.of(llama, Alone())
    by_pieces.decoder._takes_by_kernel = False
    found: list[list[Tensor]] = []
    for rank in (by_kernel, by_pieces):
        taken, kept = HiddenStates(layers, is_final=is_final, is_normed=is_final), list[Tensor]()
        for turn in range(3):
            ids = [(7 * i + turn) % 500 for i in range(sum(num_new))]
            lens = np.array(num_new, dtype=np.int32)
            tables = np.arange(4 * len(num_new), dtype=np.int32).reshape(-1, 4)
            step = Step(lens, lens + 2 * turn, tables, np.array(ids, dtype=np.int32), np.cumsum(lens) - 1)
            num_sampled = rank.decoder.take(step)
            taken.begin(())
            rank.decoder.step(num_sampled, taken=taken, reads_all=True)
            rows, first = taken.place
            kept += [rows[first : first + len(ids)], rank.decoder.logits(num_sampled).clone()]
            assert torch.equal(taken.rows, kept[-2])
        found.append(kept)
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)
