import math

import pytest
import torch

from diptych.kernels.common.lang import jit, tl
from diptych.kernels.sampling.gumbel import gumbel, gumbels, uniforms
from diptych.kernels.sampling.sampling import Draws, sample_triton, sample_twin

from .common import DEVICE, Launch, meta, normal

F32, I32, I64 = torch.float32, torch.int32, torch.int64


def launch(dtype: torch.dtype) -> None:
    floats = [meta(8, dtype=F32) for _ in range(3)]
    sample_triton(meta(8, 131072, dtype=dtype), Draws(*floats, meta(8, dtype=I32), meta(8, dtype=I64)))


LAUNCHES = [
    Launch("128k", lambda: launch(F32)),
    Launch("128k bfloat16", lambda: launch(torch.bfloat16), is_gated=False),
]


def draws(settings: list[tuple[float, float, float, int]]) -> Draws:
    """Rows of (temperature, min_p, top_p, top_k), each with a different key."""
    temperature, min_p, top_p, top_k = (list(column) for column in zip(*settings, strict=True))
    generator = torch.Generator().manual_seed(5)
    return Draws(
        torch.tensor(temperature, device=DEVICE),
        torch.tensor([math.log(p) if p else -math.inf for p in min_p], device=DEVICE),
        torch.tensor(top_p, device=DEVICE),
        torch.tensor(top_k, device=DEVICE, dtype=I32),
        torch.randint(-(1 << 63), (1 << 63) - 1, (len(settings),), generator=generator).to(DEVICE),
    )


def settings(vocab_size: int) -> list[tuple[float, float, float, int]]:
    return [
        (0.0, 0.0, 1.0, 0),
        (1.0, 0.0, 1.0, 0),
        (0.7, 0.0, 1.0, 0),
        (30.0, 0.0, 1.0, 0),
        (1e-6, 0.0, 1.0, 0),
        (1.0, 0.02, 1.0, 0),
        (1.0, 0.0, 1.0, 1),
        (1.0, 0.0, 1.0, 50),
        (3.0, 0.0, 1.0, vocab_size + 5),
        (1.0, 0.0, 0.9, 0),
        (1.0, 0.0, 1e-6, 0),
        (20.0, 0.0, 0.999, 0),
        (1.0, 0.0, 0.9, 50),
        (1.3, 0.01, 0.8, 300),
    ]


def rows_of(vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[one for each of the settings, vocab]: many ties in some, in some many tokens that are impossible."""
    num_rows = len(settings(vocab_size))
    logits = (
        normal(num_rows, vocab_size + 9, dtype=F32)[:, 4:-5] * torch.linspace(0.5, 6, num_rows, device=DEVICE)[:, None]
    )
    logits[1::2] = logits[1::2].bfloat16().float()
    logits[2::3, 1::5] = -torch.inf
    return logits.to(dtype)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, F32), (2, F32), (33, torch.bfloat16), (1007, F32), (1007, torch.bfloat16), (9001, F32)],
)
def test_sample(vocab_size: int, dtype: torch.dtype) -> None:
    logits, how = rows_of(vocab_size, dtype), draws(settings(vocab_size))
    before = logits.clone()
    assert sample_triton(logits, how).tolist() == sample_twin(logits, how).tolist()
    assert torch.equal(logits, before)


def test_a_nucleus_is_of_the_mass_that_top_k_keeps() -> None:
    """Also where fewer tokens than top-k have its share of the row's mass."""
    logits, how = 3 * normal(24, 60, dtype=F32), draws([(1.8, 0.0, 0.5, 40), (1.8, 0.3, 0.5, 40)] * 12)
    assert sample_triton(logits, how).tolist() == sample_twin(logits, how).tolist()


def test_a_row_is_drawn_the_same_in_any_batch() -> None:
    """For any number of programs per row: alone a row has three, in a batch one."""
    some = [1, 7, 9, 12]
    logits, how = rows_of(9001, F32)[some], draws(settings(9001))

    def draws_of(rows: list[int]) -> Draws:
        return Draws(how.temperature[rows], how.log_min_p[rows], how.top_p[rows], how.top_k[rows], how.keys[rows])

    alone = [sample_triton(logits[i : i + 1], draws_of([row])).item() for i, row in enumerate(some)]
    assert sample_triton(logits.repeat(4, 1), draws_of(some * 4)).tolist() == alone * 4


def test_ties() -> None:
    """The lowest id wins; every tie with the last one kept is kept."""
    logits = torch.zeros(3, 100, device=DEVICE)
    logits[1, [40, 41, 99]] = 2.0
    logits[2] = -torch.inf
    assert sample_triton(logits, draws([(0.0, 0.0, 1.0, 0)] * 3)).tolist() == [0, 40, 0]
    logits = torch.full((24, 64), -1.0, device=DEVICE)
    logits[:, 10:14] = 0.0
    limits = [(1.0, 0.0, 1.0, 3) if i % 2 else (1.0, 0.0, 0.01, 0) for i in range(24)]
    assert set(sample_triton(logits, draws(limits)).tolist()) == {10, 11, 12, 13}


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # of numpy, which interprets
def test_rows_without_a_likely_token_still_give_one_in_range() -> None:
    logits = torch.zeros(4, 40, device=DEVICE)
    logits[0], logits[1], logits[2, 7], logits[3, 7] = torch.nan, -torch.inf, torch.inf, torch.nan
    for limits in ((0.0, 0.0, 1.0, 0), (1.0, 0.0, 1.0, 0), (1.0, 0.1, 0.5, 3)):
        assert all(0 <= token < 40 for token in sample_triton(logits, draws([limits] * 4)).tolist())


@jit
def _noise_kernel(key: tl.tensor, out: tl.tensor, NUM: tl.constexpr):
    """Grid: (1,)."""
    i = tl.arange(0, NUM)
    tl.store(out + i, gumbels(uniforms(tl.load(key), i.to(tl.int64))))


@pytest.mark.parametrize("key", [0, -1, 0x1234_5678_9ABC_DEF0])
def test_noise_has_the_twins_bits(key: int) -> None:
    noise = torch.empty(4096, device=DEVICE)
    _noise_kernel[(1,)](torch.tensor(key, device=DEVICE), noise, NUM=4096)
    assert torch.equal(noise, gumbel([key], 4096, torch.device(DEVICE))[0])
