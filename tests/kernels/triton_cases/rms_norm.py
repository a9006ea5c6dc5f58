import pytest
import torch

from diptych.kernels.rms_norm import add_rms_norm_triton, add_rms_norm_twin, rms_norm_triton, rms_norm_twin

from .common import DTYPES, Launch, assert_near, meta, normal

LAUNCHES = [
    Launch("4096", lambda: rms_norm_triton(meta(64, 4096), meta(4096), 1e-5)),
    Launch("heads of 128", lambda: rms_norm_triton(meta(64, 32, 128), meta(128), 1e-5), is_gated=False),
    Launch("add 4096", lambda: add_rms_norm_triton(meta(64, 4096), meta(64, 4096), meta(4096), 1e-5)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 33), (25, 30, 20), (2, 1, 7), (11, 3000)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(*shape[:-1], shape[-1] + 5, dtype=dtype)[..., 2:-3]
    weight = normal(shape[-1], dtype=dtype, seed=1)
    assert_near(rms_norm_triton(x, weight, 1e-5), rms_norm_twin(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (70, 33)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = normal(shape[0], shape[1] + 3, dtype=dtype)[:, 3:], normal(shape[1], dtype=dtype, seed=1)
    residuals = [normal(*shape, dtype=dtype, seed=2) for _ in range(2)]
    expected = add_rms_norm_twin(x, residuals[0], weight, 1e-5)
    assert_near(add_rms_norm_triton(x, residuals[1], weight, 1e-5), expected)
    assert_near(residuals[1], residuals[0])
