"""Products of experts in Gluon: which ones it takes, and on a GPU what it gives."""

import itertools
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.kernels.common.tuning import CHIPS
from diptych.kernels.elementwise.gate_mul import GELU, SILU
from diptych.kernels.moe import hopper_experts
from diptych.kernels.moe.grouped_gemm import grouped_product_triton
from diptych.kernels.moe.moe_sort import ExpertOrder, moe_sort, moe_sort_twin

ROOT = Path(__file__).parents[3]
NUM_EXPERTS, TOP_K, TOKENS = 3, 2, 20


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(hopper_experts, "chip_of", lambda _: CHIPS["h200"])
    return monkeypatch


def order_of(block_m: int = 128) -> ExpertOrder:
    experts = torch.arange(TOKENS * TOP_K, dtype=torch.int32).view(TOKENS, TOP_K) % NUM_EXPERTS
    return moe_sort_twin(experts, NUM_EXPERTS, block_m)


def halves(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def test_it_takes_products_of_whole_steps_of_k(on_hopper: pytest.MonkeyPatch) -> None:
    x, gate_up, order = halves(TOKENS, 256), halves(NUM_EXPERTS, 80, 256), order_of()
    takes = hopper_experts.takes
    assert takes(x, gate_up, order, SILU) and takes(x, gate_up, order, None)
    assert not takes(x, gate_up, order_of(64), SILU) and not takes(x, gate_up, order, GELU)
    assert not takes(x.half(), gate_up.half(), order, SILU)
    assert not takes(halves(TOKENS, 288), halves(NUM_EXPERTS, 80, 288), order, SILU)
    short = halves(TOKENS, 128), halves(NUM_EXPERTS, 80, 128), order, SILU
    assert not takes(*short) and takes(*short, stages=3)
    assert not takes(x, halves(NUM_EXPERTS, 72, 256), order, SILU)  # 36 columns
    assert not takes(halves(TOKENS, 257)[:, 1:], gate_up, order, SILU)
    on_hopper.setattr(hopper_experts, "chip_of", lambda _: CHIPS["b200"])
    assert not takes(x, gate_up, order, SILU)


def test_only_what_was_chosen_is_computed_by_it(on_hopper: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, ...]] = []

    def launch(x: torch.Tensor, weight: torch.Tensor, *_: object) -> None:
        launched.append(tuple(weight.shape))

    plain: list[object] = []
    on_hopper.setattr(hopper_experts, "launch", launch)
    on_hopper.setattr("diptych.kernels.moe.grouped_gemm._launch_dense", lambda *of: plain.append(of))
    x, gate_up, bias = halves(TOKENS, 256), halves(NUM_EXPERTS, 80, 256), halves(NUM_EXPERTS, 80)

    def run(order: ExpertOrder, given: Any = None, *, in_gluon: bool = True) -> None:
        grouped_product_triton(x, gate_up, order, x.dtype, None, given, SILU, in_gluon=in_gluon)

    run(order_of(), in_gluon=False)
    assert len(plain) == 1 and not launched
    run(order_of())
    assert len(plain) == 1 and launched == [(NUM_EXPERTS, 80, 256)]
    run(order_of(64))
    run(order_of(), bias)
    assert len(plain) == 3 and len(launched) == 1


def compare() -> None:
    """Hold both products against the plain kernel's, on a GPU: sizes that fill no tile, pairs that are not here."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    sizes = (1, 3, 2, 256, 256), (700, 3, 2, 320, 200), (3001, 7, 4, 1024, 320)
    for stages, (tokens, num_experts, top_k, dim, inner) in itertools.product((3, 4), sizes):
        scores = torch.rand(tokens, num_experts + 2, generator=generator, device="cuda")
        order = moe_sort(scores.topk(top_k).indices.int().contiguous(), num_experts, hopper_experts.BLOCK_M)
        num_here = int(order.starts[-1])
        for rows, k, gate in ((2 * inner, dim, SILU), (dim, 256, None)):
            weight = normal(num_experts, rows, k) / k**0.5
            x = normal(tokens * (top_k if gate is None else 1), k)
            plain = grouped_product_triton(x, weight, order, x.dtype, gate=gate)
            found = torch.full_like(plain, torch.nan)
            assert hopper_experts.takes(x, weight, order, gate, stages)
            hopper_experts.launch(x, weight, order, gate, found, stages)
            written = torch.arange(num_here, device="cuda") if gate is not None else order.pairs[:num_here].long()
            assert int(found.isnan().all(dim=1).sum()) == len(found) - num_here
            torch.testing.assert_close(found[written], plain[written], rtol=2e-2, atol=2e-2)
    print("equal")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_its_products_on_hopper_are_those_of_the_plain_kernel() -> None:
    """In a process of its own: a barrier that nobody arrives at would hang for ever."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is for sm_90")
    program = "from tests.kernels.moe.test_hopper_experts import compare; compare()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0 and "equal" in done.stdout, done.stdout + done.stderr
