"""Choice of what attends for prompts: what is compared, and who gets what was chosen."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention import paged_attention
from diptych.kernels.attention.libraries import prompt_library
from diptych.kernels.attention.libraries.cudnn_calls import Sizes
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from diptych.kernels.common.tuning import CHIPS
from diptych.kernels.mla import cudnn_latents, prefill
from diptych.kernels.mla.prefill import Chunks
from diptych.workers.common.errors import ConfigError
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution import model_runner
from diptych.workers.execution.common import library_choice
from diptych.workers.execution.common.library_choice import PromptLibraries
from diptych.workers.execution.common.timed_choice import Contest, Named, Timed, Work
from diptych.workers.execution.gpu import prompt_part
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import LatentSpec

from ....support.gpu.fake_cudnn import TINY, FakeCudnn, chosen, take_float32
from ....support.gpu.fake_flash_attention import make_package
from ....support.gpu.serving import GREEDY, assert_tokens, cases_of, generate, late, load


class Taking:
    """Attends as our kernels do, and notes the sizes that it is asked for."""

    name = "a library"

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def takes(self, q: Tensor, cache: Tensor, options: object, scales: object) -> bool:
        self.asked.append([*q.shape, *cache.shape])
        return True

    def attend(
        self, q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, out: Tensor, first_seq: int
    ) -> None:
        out.copy_(library_choice.paged_attention(q, cache, batch, options))

    def takes_latent(self, q: Tensor, values: Tensor) -> bool:
        self.asked.append([*q.shape, *values.shape])
        return True

    def attend_latent(self, *arguments: Any) -> Tensor:
        return library_choice.mla_prefill(*arguments)


@pytest.mark.parametrize("is_latent", [False, True])
def test_prompts_are_given_the_one_that_was_chosen(
    is_latent: bool, llama: Path, latent_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sizes of the first layer, on the device: a prompt, and a chunk with something before it."""
    library, given, batch_of = Taking(), list[tuple[object, object]](), prompt_part.PagedBatch

    def noting(*arguments: Any, **named: Any) -> PagedBatch:
        given.append((named["library"], named["latent_library"]))
        return batch_of(*arguments, **named)

    def fastest(contest: Contest, own: Work, others: Sequence[tuple[Named, Work]], timed: Timed) -> Any:
        ((found, other),) = others
        results = [timed(work)[1] for work in (own, other)]
        assert torch.equal(*results) and (contest.what, contest.num_tokens) == ("prompts", 39 + 19)
        return found

    monkeypatch.setattr(library_choice, "find_library", lambda _: library)
    monkeypatch.setattr(library_choice, "fastest", fastest)
    monkeypatch.setattr(prompt_part, "PagedBatch", noting)
    runner = load(latent_of("deepseek-v3") if is_latent else llama, late(), max_batch_tokens=40)
    theirs = (None, library) if is_latent else (library, None)
    assert [sizes[0] for sizes in library.asked] == [39 + 19]
    first = given.index(theirs)  # the largest step, at the end of loading
    assert first > 0 and set(given[:first]) == {(None, None)} and set(given[first:]) == {theirs}
    given.clear()
    generate(runner, [[1, 2, 3, 4]], [GREEDY])
    assert given and set(given) == {theirs}


class Scarce(Taking):
    """Has too little memory for long contexts."""

    def attend(
        self, q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, out: Tensor, first_seq: int
    ) -> None:
        if max(batch.host_context_lens) > 500:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        out.copy_(TWINS[0](q, cache, batch, options))


def test_what_a_library_has_no_memory_for_is_found_at_load(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the longest context, which its choice did not try."""
    twin = paged_attention.paged_attention_twin

    def by_library(q: Tensor, cache: Tensor, batch: PagedBatch, *others: Any) -> Tensor:
        out = twin(q, cache, batch, *others)
        if batch.library is not None and batch.num_decodes < len(batch.host_num_new):
            batch.library.attend(q, cache, batch, NO_OPTIONS, out, batch.num_decodes)
        return out

    monkeypatch.setattr(library_choice, "find_library", lambda _: Scarce())
    monkeypatch.setattr(library_choice, "fastest", lambda _contest, _own, others, _timed: others[0][0])
    monkeypatch.setattr(paged_attention, "paged_attention_twin", by_library)
    text = r"too little memory left for the largest step: lower kv_memory_fraction .* or max_batch_tokens \(CUDA out of"
    with pytest.raises(ConfigError, match=text):
        load(llama, late(), max_batch_tokens=40)


class Hungry(Taking):
    """Copies the contexts."""

    num_bytes = 0  # of the largest copy

    def attend(
        self, q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, out: Tensor, first_seq: int
    ) -> None:
        self.num_bytes = max(self.num_bytes, 1000 * sum(batch.host_context_lens[first_seq:]))
        out.copy_(TWINS[0](q, cache, batch, options))


def test_kv_gets_what_the_largest_step_by_a_library_leaves(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Hungry()

    class Measuring(FakeDevice):
        def peak_bytes(self, work: Callable[[], object]) -> int:
            library.num_bytes = 0
            self.lane("measured").run(work)
            self.synchronize()
            return library.num_bytes

    monkeypatch.setattr(model_runner, "available_bytes", lambda _: 12 << 20)
    monkeypatch.setattr(library_choice, "find_library", lambda _: library)
    monkeypatch.setattr(library_choice, "fastest", lambda _contest, _own, others, _timed: others[0][0])
    monkeypatch.setattr(paged_attention, "paged_attention_twin", paged_by_library)
    changes = {"kv_memory_bytes": None, "kv_memory_fraction": 0.5, "max_batch_tokens": 40}
    plain, measured = (load(llama, device, **changes) for device in (late(), Measuring()))
    expected = [(12 << 20) // 2, ((12 << 20) - 1000 * 512) // 2]  # at the end of the longest context
    assert [of.memory.num_blocks for of in (plain, measured)] == [num // plain.layout.block_bytes for num in expected]


def test_memory_is_taken_beside_what_a_draft_will_need(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = list[tuple[int, int]](), prompt_part.PromptPart.take_memory

    def noting(part: prompt_part.PromptPart, max_tokens: int, later_bytes: int) -> None:
        taken.append((max_tokens, later_bytes))
        take(part, max_tokens, later_bytes)

    monkeypatch.setattr(prompt_part.PromptPart, "take_memory", noting)
    load(llama, late(), max_batch_tokens=40)
    load(llama, late(), max_batch_tokens=1100, speculation="draft", draft_model=str(llama))
    (_, without), (_, beside) = taken
    assert [num for num, _ in taken] == [40, 1100] and without == 0 < beside


@pytest.fixture
def chosen_at_load(monkeypatch: pytest.MonkeyPatch) -> list[PromptLibraries]:
    """The choices, where of several libraries the first is the fastest."""
    chosen, choose = list[PromptLibraries](), library_choice.choose_libraries

    def noting(*arguments: Any) -> PromptLibraries:
        chosen.append(choose(*arguments))
        return chosen[-1]

    monkeypatch.setattr(library_choice, "choose_libraries", noting)
    monkeypatch.setattr(library_choice, "fastest", lambda _contest, _own, others, _timed: others[0][0])
    return chosen


WINDOW = r"window 24, logit cap 0\) are not attended to by FlashAttention 3 .*: it fails .* not support local"
CAP = r"window 24, logit cap 2\) are not attended to by FlashAttention 3 .*: it fails .* not support tanh softcapping"


@pytest.mark.parametrize(
    ("arch", "max_tokens", "lacks", "warning"),
    [
        ("llama", 40, "windows", None),
        ("mistral", 40, "", None),
        ("mistral", 40, "caps", None),
        ("mistral", 40, "windows", WINDOW),
        ("mistral", 12, "windows", WINDOW),  # a window that is longer than what is tried
        ("qwen2", 40, "windows", WINDOW),  # its last layer alone has one
        ("gemma2", 40, "", None),
        ("gemma2", 40, "caps", CAP),
    ],
)
def test_a_build_without_what_a_layer_has_is_not_taken(
    arch: str,
    max_tokens: int,
    lacks: str,
    warning: str | None,
    chosen_at_load: list[PromptLibraries],
    checkpoint_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The comparison by the first layer's sizes does not tell: it has no windows and caps."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", make_package("flash_attn_interface", lacks=lacks))
    monkeypatch.setattr(prompt_library, "chip_of", lambda _: CHIPS["h100"])
    load(checkpoint_of(arch), late(), max_batch_tokens=max_tokens, dtype="bfloat16")
    (libraries,), warnings = chosen_at_load, [of.getMessage() for of in caplog.records if of.levelname == "WARNING"]
    if warning is None:
        assert isinstance(libraries.paged, prompt_library.FlashAttention3) and not warnings
    else:
        assert libraries.paged is None and len(warnings) == 1 and re.search(warning, warnings[0])


class Windowless(Taking):
    name = "a library that looks at no window"

    def attend(
        self, q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, out: Tensor, first_seq: int
    ) -> None:
        super().attend(q, cache, batch, replace(options, window=0), out, first_seq)


def test_the_next_fastest_is_taken_where_one_gives_something_else_in_a_layer(
    chosen_at_load: list[PromptLibraries],
    checkpoint_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    next_one = Taking()
    monkeypatch.setattr(library_choice, "find_libraries", lambda *_: [Windowless(), next_one])
    load(checkpoint_of("mistral"), late(), max_batch_tokens=40)
    assert chosen_at_load == [PromptLibraries(paged=next_one)]
    assert "by a library that looks at no window: it fails at some sizes (RuntimeError: its results diff" in caplog.text


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudnn]:
    """cuDNN, for lengths of small models, which is the fastest, and computes wherever kernels would on a GPU."""
    take_float32(monkeypatch)
    monkeypatch.setattr(paged_attention, "paged_attention_twin", paged_by_library)
    monkeypatch.setattr(prefill, "mla_prefill_twin", latent_by_library)
    with chosen(FakeCudnn(dtypes=(torch.float32,)), TINY) as fake:
        yield fake


TWINS = paged_attention.paged_attention_twin, prefill.mla_prefill_twin


def paged_by_library(
    q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions = NO_OPTIONS, scales: Tensor | None = None
) -> Tensor:
    """Compute as paged_attention_triton does: prompts by the batch's library."""
    out, first, library = TWINS[0](q, cache, batch, options, scales), batch.num_decodes, batch.library
    has_prompts = batch.host_context_lens and first < len(batch.host_num_new)
    if has_prompts and library is not None and library.takes(q, cache, options, scales):
        out[first:] = torch.nan
        library.attend(q, cache, batch, options, out, first)
    return out


def latent_by_library(
    q: Tensor, keys: Tensor, rope_keys: Tensor, values: Tensor, chunks: Chunks, scale: float
) -> Tensor:
    if (library := chunks.library) is not None and library.takes_latent(q, values):
        return library.attend_latent(q, keys, rope_keys, values, chunks, scale)
    return TWINS[1](q, keys, rope_keys, values, chunks, scale)


@pytest.mark.parametrize("is_latent", [False, True])
def test_requests_get_the_same_tokens_by_cudnn_and_wait_for_no_plan(
    is_latent: bool,
    llama: Path,
    latent_of: Callable[[str], Path],
    cudnn: FakeCudnn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = latent_of("deepseek-v3") if is_latent else llama
    if isinstance(spec := load_spec(path).layers[0].attention, LatentSpec):
        cudnn.unlike_dims = spec.q_dim, spec.value_dim
        monkeypatch.setattr(cudnn_latents, "LATENT_DIMS", cudnn.unlike_dims)
    cases = cases_of(path)
    runner = load(path, late(), max_batch_tokens=40)
    assert cudnn.built
    for config in ({}, {"chunk_tokens": 17, "arrivals": [0, 1, 2, 3]}):
        cudnn.built.clear()
        cudnn.num_calls = 0
        assert_tokens(runner, cases, {"max_batch_tokens": 40, **config})
        assert cudnn.num_calls > 0 and not cudnn.built


def test_prompts_are_ours_where_cudnn_has_no_plan_for_a_length(
    llama: Path, cudnn: FakeCudnn, caplog: pytest.LogCaptureFixture
) -> None:
    """One that the comparison has not asked for. The fake ends if it is asked for again."""
    side = Sizes.of(40, 512, TINY).sides[0]
    cudnn.refuses = lambda plan: plan[-1] and plan[0][2] == side
    runner = load(llama, late(), max_batch_tokens=40)
    assert "prompts are not attended to by cuDNN: it fails at some sizes (RuntimeError: cuDNN Front" in caplog.text
    cudnn.num_calls = 0
    generate(runner, [list(range(1, 36))], [GREEDY])
    assert not cudnn.num_calls


def test_no_longer_prompts_are_compared_than_a_context_holds(llama: Path, cudnn: FakeCudnn) -> None:
    load(llama, late(), max_batch_tokens=40, max_context_tokens=24)
    longest = max(plan[0][2] for plan in cudnn.built)
    assert longest == 24
