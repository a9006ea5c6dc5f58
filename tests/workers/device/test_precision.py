"""Settings of cuBLAS before the first product."""

from collections.abc import Iterator

import pytest
import torch

from diptych.workers.device.precision import settle_products


@pytest.fixture
def others() -> Iterator[None]:
    """Settings of another program, and at the end those of before."""
    products = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), products.allow_bf16_reduced_precision_reduction
    torch.set_float32_matmul_precision("high")
    products.allow_bf16_reduced_precision_reduction = True
    yield
    torch.set_float32_matmul_precision(before[0])
    products.allow_bf16_reduced_precision_reduction = before[1]


@pytest.mark.usefixtures("others")
def test_float32_is_float32_and_sums_are_not_narrowed() -> None:
    for _ in range(2):
        settle_products()
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
