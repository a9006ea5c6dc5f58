"""cuDNN's attention over expanded latents in place of our kernel, by the fake of torch's operator."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.libraries.cudnn_calls import Sizes
from diptych.kernels.mla import cudnn_latents
from diptych.kernels.mla.cudnn_latents import CudnnLatents, find_cudnn_latents
from diptych.kernels.mla.prefill import Chunks, mla_prefill_twin

from ...support.gpu.fake_cudnn import TINY, FakeCudnn, place, registered, take_float32

MOST_NEW, MOST_CONTEXT = 32, 60
SIZES, OF_MANY = Sizes.of(MOST_NEW, MOST_CONTEXT, TINY), Sizes.of(MOST_NEW, 36, TINY)
SCALE = 0.07


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudnn]:
    place(monkeypatch)
    take_float32(monkeypatch)
    for name, value in (("MANY", 4), ("FEW", 2), ("MOST_OF_MANY", 36)):
        monkeypatch.setattr(cudnn_latents, name, value)
    with registered(FakeCudnn(dtypes=(torch.float32,))) as made:
        yield made


@pytest.fixture
def library(fake: FakeCudnn) -> CudnnLatents:
    found = find_cudnn_latents(torch.device("cpu"), SIZES)
    assert found is not None
    return found


def inputs(num_new: list[int], context_lens: list[int], heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values side by side, as a layer expands them, with NaN around all that is given."""
    generator, num_all = torch.Generator().manual_seed(4), sum(context_lens)
    both = torch.full((num_all + 2, heads + 1, 256), torch.nan)
    both[:num_all, :heads] = torch.randn(num_all, heads, 256, generator=generator)
    keys, values = both[:num_all, :heads].split(128, dim=2)
    rope = torch.full((num_all + 2, 80), torch.nan)
    rope[:num_all, 16:] = torch.randn(num_all, 64, generator=generator)
    q = torch.randn(sum(num_new), heads, 192, generator=generator)
    return q, keys, rope[:num_all, 16:], values


@pytest.mark.parametrize(("heads", "num_calls", "sizes"), [(8, 2, OF_MANY), (6, 3, SIZES), (3, 1, SIZES)])
@pytest.mark.parametrize(
    ("context_lens", "num_new"), [([20], [20]), ([35], [13]), ([4, 32, 3, 5, 59], [4, 32, 2, 5, 10]), ([9], [3])]
)
def test_prompts_get_what_our_kernel_gives(
    context_lens: list[int],
    num_new: list[int],
    heads: int,
    num_calls: int,
    sizes: Sizes,
    library: CudnnLatents,
    fake: FakeCudnn,
) -> None:
    """In calls for as many heads as divide them; those of many heads are for short contexts."""
    chunks, given = Chunks(num_new, context_lens), inputs(num_new, context_lens, heads)
    assert library.takes_latent(given[0], given[3]) == (sum(num_new) >= TINY.least_new)
    due = mla_prefill_twin(*given, chunks, SCALE)
    for _ in range(2):  # the second time with what the chunks keep for all layers
        torch.testing.assert_close(library.attend_latent(*given, chunks, SCALE), due, rtol=1e-5, atol=1e-5)
    cuts = [cut for _, cut in sizes.runs(num_new, context_lens) if cut is not None]
    assert fake.num_calls == 2 * num_calls * sum(1 + len(cut.pieces) for cut in cuts)
    for query, key, value, *_ in fake.built:
        assert query[1] == key[1] == value[1] == heads // num_calls and (query[3], value[3]) == (192, 128)


def test_no_plan_is_built_once_it_is_prepared(library: CudnnLatents, fake: FakeCudnn) -> None:
    """However many heads a layer expands at once."""
    library.prepare(inputs([1], [1], 8)[0], SCALE)
    num_plans = sum(len(sizes.sides) + len(sizes.rows) * len(sizes.pieces) for sizes in (SIZES, OF_MANY))
    assert len(fake.built) == len(set(fake.built)) == num_plans
    fake.built.clear()
    fake.num_calls = 0
    for num_new in range(6, MOST_NEW + 1, 3):
        for context_len in range(num_new, MOST_CONTEXT + 1, 5):
            for heads in (2, 4, 6, 8):
                given = inputs([num_new], [context_len], heads)
                assert library.takes_latent(given[0], given[3])
                library.attend_latent(*given, Chunks([num_new], [context_len]), SCALE)
    assert fake.num_calls > 100 and not fake.built
    assert not library.takes_latent(*inputs([9], [9], 3)[::3])


def test_what_it_does_not_know_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch)
    library = find_cudnn_latents(torch.device("cpu"), SIZES)
    assert library is not None
    q, values = torch.zeros(9, 4, 192, dtype=torch.bfloat16), torch.zeros(9, 4, 128, dtype=torch.bfloat16)
    assert library.takes_latent(q, values)
    assert not library.takes_latent(q.float(), values.float())
    assert not library.takes_latent(q[..., :160], values) and not library.takes_latent(q, values[..., :96])
    assert not library.takes_latent(q[:5], values)
    place(monkeypatch, version=91500)
    assert find_cudnn_latents(torch.device("cpu"), SIZES) is None
