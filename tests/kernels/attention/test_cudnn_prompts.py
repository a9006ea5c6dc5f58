"""cuDNN's attention in place of our kernel, by a fake of torch's operator that refuses and keeps plans as ATen does."""

import threading
from collections.abc import Iterator

import pytest
import torch

from diptych.kernels.attention.libraries.cudnn_calls import CudnnConfig, Sizes
from diptych.kernels.attention.libraries.cudnn_prompts import CudnnPrompts, find_cudnn_prompts
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from diptych.kernels.attention.prefill_attention import prefill_attention_twin

from ...support.gpu.fake_cudnn import TINY, FakeCudnn, place, registered, take_float32
from ...support.paged import make_batch, make_cache

HALF = torch.bfloat16
MOST_NEW, MOST_CONTEXT = 40, 80
SIZES = Sizes.of(MOST_NEW, MOST_CONTEXT, TINY)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudnn]:
    place(monkeypatch)
    take_float32(monkeypatch)
    with registered(FakeCudnn(dtypes=(torch.float32,))) as made:
        yield made


@pytest.fixture
def library(fake: FakeCudnn) -> CudnnPrompts:
    found = find_cudnn_prompts(torch.device("cpu"), SIZES)
    assert found is not None
    return found


def queries(num: int, heads: int = 6, dim: int = 16) -> torch.Tensor:
    """Queries with other numbers between those of two tokens."""
    rows = torch.randn(num, heads + 3, dim, generator=torch.Generator().manual_seed(2))
    return rows[:, 1 : 1 + heads]


def check(
    library: CudnnPrompts, context_lens: list[int], num_new: list[int], options: AttentionOptions = NO_OPTIONS
) -> tuple[torch.Tensor, PagedBatch]:
    """Compare with our kernel's twin, over a strided cache, NaN where no sequence has a token."""
    batch = make_batch(context_lens, num_new, 5, 100)
    cache, q = make_cache(batch, 100, 2, 16, torch.float32), queries(sum(num_new))
    assert library.takes(q, cache, options, None)
    due, first = prefill_attention_twin(q, cache, batch, options), batch.num_decodes
    out = torch.full(q.shape, 7.0)
    library.attend(q, cache, batch, options, out, first)
    torch.testing.assert_close(out[first:], due[first:], rtol=1e-5, atol=1e-5)
    assert (out[:first] == 7).all()
    again = torch.full(q.shape, 7.0)
    library.attend(q, cache, batch, options, again, first)  # with what the batch keeps for all layers
    assert torch.equal(again, out)
    return out, batch


@pytest.mark.parametrize("num_new", [11, 12, 13, 16, 17, 18, 31, 32, 33, 39, 40])
def test_whole_prompts_of_lengths_at_and_beside_those_of_plans(
    num_new: int, library: CudnnPrompts, fake: FakeCudnn
) -> None:
    check(library, [num_new], [num_new])
    ((query, key, _, _, _, _, has_logs, is_causal),) = fake.built
    assert query[2] == key[2] in SIZES.sides and has_logs and is_causal
    assert query[1] == 6 and key[1] == 2  # keys are not repeated


@pytest.mark.parametrize("num_new", [6, 12, 19, 40])
@pytest.mark.parametrize("history", [1, 7, 8, 9, 16, 23, 24, 39, 40])
def test_chunks_attend_to_what_stands_before_them(
    history: int, num_new: int, library: CudnnPrompts, fake: FakeCudnn
) -> None:
    check(library, [history + num_new], [num_new], AttentionOptions(scale=0.4))
    if SIZES.cut(num_new, history + num_new) is None:
        assert not fake.built and num_new == 6
    else:
        pieces = [plan[1][2] for plan in fake.built if not plan[-1]]
        assert (history >= 8) == bool(pieces) and set(pieces) <= set(SIZES.pieces)


@pytest.mark.parametrize(
    ("context_lens", "num_new"),
    [
        ([33, 5, 20, 13], [1, 1, 20, 13]),
        ([60, 9, 31, 3, 2, 70, 12], [1, 9, 31, 3, 2, 11, 12]),  # those of little work between the others
        ([30, 6], [30, 6]),
        ([4, 3, 40], [4, 3, 40]),
    ],
)
def test_sequences_of_little_work_are_our_kernels(
    context_lens: list[int], num_new: list[int], library: CudnnPrompts, fake: FakeCudnn
) -> None:
    check(library, context_lens, num_new)
    cuts = [SIZES.cut(*each) for each in zip(num_new, context_lens, strict=True)]
    assert fake.num_calls == 2 * sum(1 + len(cut.pieces) for cut in cuts if cut is not None) > 0


def test_steps_of_little_work_take_no_call(library: CudnnPrompts, fake: FakeCudnn) -> None:
    check(library, [9, 30], [5, 4])
    assert not fake.num_calls


def test_results_do_not_depend_on_company(library: CudnnPrompts) -> None:
    context_lens, num_new = [5, 41, 8, 33], [1, 17, 8, 33]
    batch = make_batch(context_lens, num_new, 5, 100)
    cache, q = make_cache(batch, 100, 2, 16, torch.float32), queries(sum(num_new))
    out = torch.empty(q.shape)
    library.attend(q, cache, batch, NO_OPTIONS, out, batch.num_decodes)
    for s, row in ((1, 1), (3, 26)):
        rows = slice(row, row + num_new[s])
        starts = torch.tensor([0, num_new[s]], dtype=torch.int32)
        tables = batch.block_tables[s : s + 1], batch.context_lens[s : s + 1]
        alone = PagedBatch(*tables, starts, [context_lens[s]], [num_new[s]], 0, 5)
        due = torch.empty(num_new[s], *q.shape[1:])
        library.attend(q[rows], cache, alone, NO_OPTIONS, due, 0)
        assert torch.equal(out[rows], due)


def test_no_plan_is_built_once_it_is_prepared(library: CudnnPrompts, fake: FakeCudnn) -> None:
    """For any sequence, of whichever thread."""
    cache = make_cache(make_batch([1], [1], 5, 100), 100, 2, 16, torch.float32)
    library.prepare(queries(1), cache, 0.25)
    library.prepare(queries(1), cache, 0.25)
    num_plans = len(SIZES.sides) + len(SIZES.rows) * len(SIZES.pieces)
    assert len(fake.built) == num_plans and len(set(fake.built)) == num_plans
    fake.built.clear()

    def serve() -> None:
        for num_new in range(1, MOST_NEW + 1):
            for context_len in range(num_new, MOST_CONTEXT + 1, 7):
                batch = make_batch([context_len], [num_new], 5, 100)
                q = queries(num_new)
                if library.takes(q, cache, NO_OPTIONS, None):
                    library.attend(q, cache, batch, NO_OPTIONS, torch.empty(q.shape), 0)
        q = torch.randn(32, 6, 16)  # in order, and as long as a plan
        library.attend(q, cache, make_batch([32], [32], 5, 100), NO_OPTIONS, torch.empty_like(q), 0)

    fake.num_calls = 0
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert fake.num_calls > 100 and not fake.built


def test_heads_that_were_not_prepared_are_ours(library: CudnnPrompts) -> None:
    cache = make_cache(make_batch([1], [1], 5, 100), 100, 2, 16, torch.float32)
    assert library.takes(queries(9, heads=4), cache, NO_OPTIONS, None)
    library.prepare(queries(1), cache, 0.25)
    assert library.takes(queries(9), cache, NO_OPTIONS, None)
    assert not library.takes(queries(9, heads=4), cache, NO_OPTIONS, None)


def test_what_it_does_not_know_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch)
    library = find_cudnn_prompts(torch.device("cpu"), SIZES)
    assert library is not None
    q, cache = torch.zeros(9, 4, 64, dtype=HALF), torch.zeros(2, 2, 16, 2, 64, dtype=HALF)
    assert library.takes(q, cache, AttentionOptions(scale=0.3), None)
    for options in (AttentionOptions(window=5), AttentionOptions(softcap=5.0), AttentionOptions(sinks=torch.zeros(4))):
        assert not library.takes(q, cache, options, None)
    assert not library.takes(q, cache.to(torch.int8), NO_OPTIONS, torch.zeros(2, 2, 16, 2))
    assert not library.takes(q.float(), cache.float(), NO_OPTIONS, None)
    assert not library.takes(q[:5], cache, NO_OPTIONS, None)
    assert library.takes(q.new_zeros(9, 4, 256), cache.new_zeros(2, 2, 16, 2, 256), NO_OPTIONS, None)
    for dim in (20, 264):
        assert not library.takes(q.new_zeros(9, 4, dim), cache.new_zeros(2, 2, 16, 2, dim), NO_OPTIONS, None)
    place(monkeypatch, chip="b200")
    library = find_cudnn_prompts(torch.device("cpu"), SIZES)
    assert library is not None
    assert not library.takes(q.new_zeros(9, 4, 256), cache.new_zeros(2, 2, 16, 2, 256), NO_OPTIONS, None)


def test_it_is_found_where_aten_prefers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert find_cudnn_prompts(device, SIZES) is None  # torch for CPUs
    place(monkeypatch, version=91500)
    assert find_cudnn_prompts(device, SIZES) is None
    place(monkeypatch, chip="a100")
    assert find_cudnn_prompts(device, SIZES) is None
    place(monkeypatch, chip="b200")
    assert find_cudnn_prompts(device, SIZES) is not None
    assert find_cudnn_prompts(device, Sizes.of(10, MOST_CONTEXT, TINY)) is None  # no prompt of a step is long enough


@pytest.mark.parametrize(("max_tokens", "max_context"), [(8192, 131072), (2048, 4096), (6000, 6000), (8192, 40960)])
def test_plans_are_some_and_padding_is_little(max_tokens: int, max_context: int) -> None:
    sizes = Sizes.of(max_tokens, max_context)
    assert len(sizes.sides) + len(sizes.rows) * len(sizes.pieces) <= 135
    assert all(length % 128 == 0 for length in (*sizes.sides, *sizes.rows, *sizes.pieces))
    if max_tokens % 128 == 0:
        full = sizes.cut(max_tokens, max_tokens)
        assert full is not None and full.side == max_tokens  # a step's largest prompt has no padding
    wasted: list[float] = []
    for num_new in range(512, max_tokens + 1, 7):
        for history in (0, 100, 1024, 5000, max_context - num_new):
            cut = sizes.cut(num_new, min(num_new + history, max_context))
            if cut is not None:
                before = min(history, max_context - num_new)
                assert cut.front + sum(cut.pieces) == before and 0 <= cut.front < 1024
                assert cut.side >= cut.front + num_new and cut.rows >= num_new
                if cut.front + num_new >= 2048:
                    wasted.append((cut.side / (cut.front + num_new)) ** 2 - 1)
    assert sum(wasted) / len(wasted) < 0.07


def test_defaults_leave_short_prompts_and_short_chunks_to_our_kernel() -> None:
    sizes = Sizes.of(8192, 131072)
    assert sizes.config == CudnnConfig()
    assert sizes.cut(1024, 1024) is None and sizes.cut(511, 100_000) is None and sizes.cut(1024, 1500) is None
    assert sizes.cut(2047, 2047) is not None and sizes.cut(512, 8192) is not None
    assert sizes.cut(8193, 8193) is None and sizes.cut(512, 131073) is None  # beyond what plans are for
