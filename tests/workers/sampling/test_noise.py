"""Counter-based noise: the same bits everywhere, with the expected statistics."""

import math
from itertools import pairwise

import torch

from diptych.kernels.sampling.gumbel import gumbel
from diptych.workers.sampling.noise import stream_key

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The generator's output function, in whole numbers."""
    x = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def test_splitmix64_is_the_published_one() -> None:
    """First outputs of SplitMix64 from seed 1234567 (Vigna's splitmix64.c)."""
    golden = 0x9E3779B97F4A7C15
    outputs = [splitmix64((1234567 + i * golden) & MASK) for i in range(1, 4)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_follows_the_formula() -> None:
    golden = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (7, 1), (2**64 - 1, 100_000)):
        key = stream_key(seed, position)
        expected_key = splitmix64(seed ^ splitmix64((position + 1) * golden & MASK))
        assert key & MASK == expected_key
        uniform = [(splitmix64((expected_key + t * golden) & MASK) >> 11) * 2.0**-53 for t in range(300)]
        expected = torch.tensor([-math.log(-math.log1p(-u)) for u in uniform], dtype=torch.float32)
        torch.testing.assert_close(gumbel([key], 300, CPU)[0], expected, rtol=1e-4, atol=1e-5)


def test_noise_depends_on_its_key_alone() -> None:
    keys = [stream_key(seed, 5) for seed in range(8)]
    together = gumbel(keys, 1000, CPU)
    alone = torch.cat([gumbel([key], 1000, CPU) for key in reversed(keys)]).flip(0)
    assert torch.equal(together, alone)
    assert torch.equal(together[:, :77], gumbel(keys, 77, CPU))


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    keys = [stream_key(seed, position) for seed in range(20) for position in range(20)]
    assert len(set(keys)) == len(keys)
    noise = gumbel(keys, 4096, CPU)
    correlations = torch.corrcoef(noise).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 6 / math.sqrt(4096)
    for a, b in pairwise((0, 1, 17, 100)):  # and along one stream
        shifted = torch.corrcoef(torch.stack((noise[:, a], noise[:, b])))[0, 1]
        assert abs(float(shifted)) < 5 / math.sqrt(len(keys))


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel([stream_key(3, position) for position in range(200)], 5000, CPU).flatten().double()
    assert torch.isfinite(noise).all()
    uniform = (-(-noise).exp()).exp()  # the distribution function
    counts = torch.histc(uniform, bins=100, min=0.0, max=1.0)
    chi_square = float(((counts - 10_000) ** 2 / 10_000).sum())
    assert 50 < chi_square < 160  # 99 degrees of freedom: outside once in 10,000 seeds
