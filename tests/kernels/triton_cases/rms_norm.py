import pytest
import torch

from diptych.kernels.elementwise.rms_norm import add_rms_norm_triton, add_rms_norm_twin, rms_norm_triton, rms_norm_twin

from .common import DOT_DTYPES, DTYPES, FOLLOWING, Launch, assert_near, following, meta, normal

LAUNCHES = [
    Launch("4096", lambda: rms_norm_triton(meta(64, 4096), meta(4096), 1e-5)),
    Launch("heads of 128", lambda: rms_norm_triton(meta(64, 32, 128), meta(128), 1e-5), is_gated=False),
    Launch("weight float32", lambda: rms_norm_triton(meta(64, 4096), meta(4096, dtype=torch.float32), 1e-5)),
    Launch("no weight", lambda: rms_norm_triton(meta(64, 4, 512), None, 1e-5), is_gated=False),
    Launch("add 4096", lambda: add_rms_norm_triton(meta(64, 4096), meta(64, 4096), meta(4096), 1e-5)),
    Launch(
        "add 4096, follows",
        following(lambda: add_rms_norm_triton(meta(64, 4096), meta(64, 4096), meta(4096), 1e-5)),
        FOLLOWING,
        gated_targets=("sm_90",),
    ),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 33), (25, 30, 20), (2, 1, 7), (11, 3000)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(*shape[:-1], shape[-1] + 5, dtype=dtype)[..., 2:-3]
    weight = normal(shape[-1], dtype=dtype, seed=1)
    for by in (weight, None):
        assert_near(rms_norm_triton(x, by, 1e-5), rms_norm_twin(x, by, 1e-5))


def test_a_weight_of_float32_is_met_before_rounding() -> None:
    """Bit for bit but where the formula itself is half way between two of its dtype's numbers, or nearly."""
    x, weight = normal(8, 256, dtype=DOT_DTYPES[1]), normal(256, dtype=torch.float32, seed=1)
    found, expected = rms_norm_triton(x, weight, 1e-5), rms_norm_twin(x, weight, 1e-5)
    assert (found != expected).float().mean() < 0.01
    twice = rms_norm_twin(x, torch.ones_like(weight).to(x.dtype), 1e-5).float() * weight
    assert (found != twice.to(x.dtype)).float().mean() > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (70, 33)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = normal(shape[0], shape[1] + 3, dtype=dtype)[:, 3:], normal(shape[1], dtype=dtype, seed=1)
    residuals = [normal(*shape, dtype=dtype, seed=2) for _ in range(2)]
    expected = add_rms_norm_twin(x, residuals[0], weight, 1e-5)
    assert_near(add_rms_norm_triton(x, residuals[1], weight, 1e-5), expected)
    assert_near(residuals[1], residuals[0])
