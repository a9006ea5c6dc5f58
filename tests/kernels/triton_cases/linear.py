import pytest
import torch
from torch.nn import functional

from diptych.kernels.gemm import scaled_gemm, weight_only_gemm
from diptych.kernels.gemm.few_rows import FEW_ROWS, LinearTile, few_rows_product
from diptych.kernels.gemm.linear import linear, row_counts
from diptych.kernels.gemm.packed_weight import pack
from diptych.kernels.gemm.quantise_rows import quantise_rows_twin
from diptych.kernels.gemm.scaled_gemm import ScaledWeight
from diptych.kernels.gemm.split_k import _WORKSPACES

from ...support.quantised import random_codes, random_scaled
from .common import DEVICE, DOT_DTYPES, FOLLOWING, Launch, assert_near, following, meta, normal

HALF = DOT_DTYPES[1]


def launch(n: int, k: int, rows: int = 16) -> None:
    few_rows_product(meta(rows, k), meta(n, k), None, LinearTile(64, 128, 4, 6))


LAUNCHES = [
    Launch("one split", lambda: launch(28672, 4096), ("sm_90",)),
    Launch("eight splits", lambda: launch(4096, 14336), ("sm_90",)),
    Launch("eight splits, follows", following(lambda: launch(4096, 14336)), FOLLOWING, gated_targets=("sm_90",)),
    Launch("64 rows", lambda: launch(4096, 14336, 64), ("sm_90",), is_gated=False),
]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 70, 96), (3, 40, 520), (16, 33, 200), (30, 20, 64), (64, 17, 130)])
@pytest.mark.parametrize("tile", [LinearTile(16, 32, 4, 1), LinearTile(64, 64, 4, 3, max_splits=2)])
def test_linear(rows: int, n: int, k: int, has_bias: bool, tile: LinearTile) -> None:
    x, weight = normal(rows, k + 8, dtype=HALF)[:, :k], normal(n, k, dtype=HALF, seed=1) / k**0.5
    bias = normal(n, dtype=HALF, seed=2) if has_bias else None
    found = few_rows_product(x, weight, bias, tile)
    expected = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert found.dtype == HALF and found.is_contiguous()
    assert_near(found, expected)


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    x, weight = normal(FEW_ROWS, 1024, dtype=HALF), normal(48, 1024, dtype=HALF, seed=1)
    together = linear(x, weight)
    for row in (0, 7, FEW_ROWS - 1):
        assert torch.equal(linear(x[row : row + 1], weight)[0], together[row])


def test_memory_of_split_products_stays_where_it_is() -> None:
    """Graphs of few rows go on using theirs after a product of more rows."""
    weight = normal(16, 1024, dtype=HALF, seed=1)
    for rows in (1, FEW_ROWS):
        linear(normal(rows, 1024, dtype=HALF), weight)
    before = {key: of.partial.data_ptr() for key, of in _WORKSPACES.items()}
    assert len({elements for *_, elements in before}) >= 2
    for rows in (FEW_ROWS, 1):
        linear(normal(rows, 1024, dtype=HALF), weight)
    assert {key: of.partial.data_ptr() for key, of in _WORKSPACES.items()} == before


def test_what_is_not_of_16_bits_or_has_many_rows_is_torchs() -> None:
    weight = torch.randn(5, 32, device=DEVICE)
    for x, of in ((normal(2, 32, dtype=torch.float32), weight), (normal(40, 32, dtype=HALF), weight.to(HALF))):
        assert torch.equal(linear(x, of), functional.linear(x, of))


def test_each_kind_of_weight_has_its_product() -> None:
    x, bias = normal(3, 96, dtype=torch.float32), normal(24, dtype=torch.float32, seed=2)
    codes, scales, zeros = (of.to(DEVICE) for of in random_codes(24, 96, 4, 32))
    packed = pack(codes, scales, zeros, 4, 32)
    assert_near(linear(x, packed, bias), weight_only_gemm.weight_only_gemm_twin(x, packed, bias))
    values, own_scales = (of.to(DEVICE) for of in random_scaled((24, 96), torch.int8, blocks=False))
    scaled = ScaledWeight(values, own_scales)
    rows = quantise_rows_twin(x, torch.int8)
    assert_near(linear(x, scaled, bias), scaled_gemm.scaled_gemm_twin(*rows, scaled, torch.float32, bias))


def test_rows_are_counted_for_every_way_in_which_kernels_are_compiled() -> None:
    codes, scales, _ = (of.to(DEVICE) for of in random_codes(24, 96, 4, 32))
    scaled = ScaledWeight(*(of.to(DEVICE) for of in random_scaled((24, 96), torch.int8, blocks=False)))
    assert row_counts([]) == [1]
    assert row_counts([normal(24, 96, dtype=HALF)]) == [1, 17, FEW_ROWS + 1]
    assert row_counts([pack(codes, scales, None, 4, 32)]) == [1, 17, 33, 65]
    assert row_counts([scaled]) == [1, 17, 65]
