"""Experts in fp8 by DeepGEMM in place of our kernels: by a fake that is as strict; on a GPU where it is installed."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.common.tuning import CHIPS, chip_of
from diptych.kernels.elementwise.gate_mul import GELU, SILU, SILU_UP_FIRST
from diptych.kernels.gemm.quantise_rows import quantise_rows
from diptych.kernels.gemm.scaled_gemm import ScaledWeight
from diptych.kernels.moe import scaled_expert_library
from diptych.kernels.moe.expert_rows import num_padded_rows, pad_rows
from diptych.kernels.moe.moe import moe_experts
from diptych.kernels.moe.moe_sort import moe_sort
from diptych.kernels.moe.scaled_expert_library import FP8, DeepGemmExperts, find_scaled_expert_library

from ...support.gpu.fake_deep_gemm import ALIGNMENT, make_deep_gemm
from ...support.quantised import random_scaled

HALF, ON = torch.bfloat16, torch.device("cpu")
NUM_EXPERTS, DIM, INNER, TOP_K = 5, 256, 128, 2
Inputs = tuple[Tensor, Tensor, Tensor, ScaledWeight, ScaledWeight]  # the first five of moe_experts


@pytest.fixture(autouse=True)
def on_hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    if request.node.get_closest_marker("gpu") is not None:  # with what is there
        return monkeypatch
    monkeypatch.setitem(sys.modules, "deep_gemm", make_deep_gemm())
    monkeypatch.setattr(scaled_expert_library, "chip_of", lambda _: CHIPS["h200"])
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() and made.element_size() > 1 else made

    monkeypatch.setattr(torch, "empty", poisoned)
    return monkeypatch


def inputs(num_tokens: int, dim: int = DIM, inner: int = INNER, num_experts: int = NUM_EXPERTS) -> Inputs:
    """Some choices are of experts that are not here, one expert has no token, and a row is padding."""
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.rand(num_tokens, num_experts + 2, generator=generator).topk(TOP_K).indices
    experts = torch.where((experts < num_experts) & (experts != 1), experts, -1).int()
    experts[-1] = -1
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    x = torch.randn(num_tokens, dim, generator=generator).to(HALF)
    shapes = (num_experts, 2 * inner, dim), (num_experts, dim, inner)
    gate_up, down = (ScaledWeight(*random_scaled(shape, FP8, blocks=True)) for shape in shapes)
    return x, weights, experts, gate_up, down


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 600])
def test_experts_are_those_of_our_kernels(num_tokens: int, has_shared: bool) -> None:
    """Of 600 tokens some experts have more rows than the alignment."""
    given = inputs(num_tokens)
    shared = torch.randn(num_tokens, DIM, generator=torch.Generator().manual_seed(1)).to(HALF) if has_shared else None
    due = moe_experts(*given, shared=shared)
    library = DeepGemmExperts()
    assert library.takes(*given, SILU)
    found = moe_experts(*given, shared=None if shared is None else shared.clone(), library=library)
    assert found.dtype == HALF and found.is_contiguous() and not found.isnan().any()
    error = found.float() - due.float()
    assert error.norm() <= 2e-2 * due.float().norm() and error.abs().max() <= 5e-2 * due.float().abs().max()
    assert torch.equal(found[-1], torch.zeros(DIM, dtype=HALF) if shared is None else shared[-1])


def test_rows_of_each_expert_begin_at_a_multiple_of_the_alignment(on_hopper: pytest.MonkeyPatch) -> None:
    """Scales are as TMA reads them, so that DeepGEMM copies none. It is told where each expert's rows end."""
    given, seen = inputs(600), list[Any]()
    module = sys.modules["deep_gemm"]
    multiply = module.m_grouped_fp8_gemm_nt_contiguous

    def noting(a: Any, b: Any, d: Tensor, ends: Tensor, **named: Any) -> None:
        seen.append((a[0].shape, a[1].stride(), b[0].data_ptr(), ends.tolist(), named))
        multiply(a, b, d, ends, **named)

    on_hopper.setattr(module, "m_grouped_fp8_gemm_nt_contiguous", noting)
    DeepGemmExperts().compute(*given)
    counts = torch.bincount(given[2][given[2] >= 0], minlength=NUM_EXPERTS).tolist()
    num_rows, due, first = num_padded_rows(1200, NUM_EXPERTS, ALIGNMENT), list[int](), 0
    for count in counts:
        due.append(first + count)
        first += -(-count // ALIGNMENT) * ALIGNMENT
    assert max(counts) > ALIGNMENT and min(counts) == 0 and first <= num_rows and num_rows % ALIGNMENT == 0
    named = {"use_psum_layout": True, "expected_m_for_psum_layout": 256}
    assert seen == [
        (torch.Size([num_rows, k]), (1, num_rows), weight.values.data_ptr(), due, named)
        for k, weight in ((DIM, given[3]), (INNER, given[4]))
    ]


@pytest.mark.parametrize(("num_pairs", "num_experts", "counts"), [(8, 4, [8, 0, 0, 0]), (8, 4, [5, 1, 1, 1])])
def test_there_are_rows_enough_whatever_is_chosen(num_pairs: int, num_experts: int, counts: list[int]) -> None:
    for alignment in (2, 4, 128):
        needed = sum(-(-count // alignment) * alignment for count in counts)
        assert needed <= num_padded_rows(num_pairs, num_experts, alignment)
    assert num_padded_rows(1, 256, 128) == 128


def test_what_it_does_not_know_is_ours() -> None:
    library, given = DeepGemmExperts(), inputs(3)
    assert library.takes(*given, SILU)
    assert not library.takes(*given, SILU_UP_FIRST) and not library.takes(*given, GELU)
    x, weights, experts, gate_up, down = given

    def takes(place: int, changed: Any) -> bool:
        return library.takes(*given[:place], changed, *given[place + 1 :], SILU)  # type: ignore[call-arg]

    for place, of in enumerate((x, weights, experts)):
        assert not takes(place, of.double()) and not takes(place, of[:, :1])
    assert not takes(0, x.mT.contiguous().mT) and takes(0, torch.cat((x, x), 1)[:, :DIM])
    assert not takes(1, weights.mT.contiguous().mT) and not takes(2, experts.long())
    for place, weight in ((3, gate_up), (4, down)):
        of_rows = ScaledWeight(*random_scaled(weight.shape, FP8, blocks=False))
        assert not takes(place, weight.unpacked()) and not takes(place, of_rows)
        assert not takes(place, replace(weight, values=weight.values.view(torch.int8)))
        assert not takes(place, replace(weight, values=weight.values.mT.contiguous().mT))
    assert not takes(4, inputs(3, dim=384)[4])
    assert not library.takes(x[:0], weights[:0], experts[:0], gate_up, down, SILU)
    assert not library.takes(*inputs(3, dim=192), SILU) and not library.takes(*inputs(3, inner=64), SILU)


def test_what_it_does_not_take_is_computed_here() -> None:
    given, library = inputs(4), DeepGemmExperts()
    biases = (torch.ones(NUM_EXPERTS, 2 * INNER, dtype=HALF), None)
    for more in ({"biases": biases}, {"first_expert": 1}, {"activation": GELU}):
        arguments: dict[str, Any] = more
        assert torch.equal(moe_experts(*given, **arguments, library=library), moe_experts(*given, **arguments))


def test_the_fake_is_strict() -> None:
    multiply = make_deep_gemm().m_grouped_fp8_gemm_nt_contiguous
    x, _, experts, gate_up, _ = inputs(40)
    padded = pad_rows(*quantise_rows(x, FP8, blocks=True), moe_sort(experts, NUM_EXPERTS, ALIGNMENT), ALIGNMENT)
    rows, ends, weight = (padded.values, padded.scales), padded.ends, (gate_up.values, gate_up.scales)
    out = torch.empty(len(padded.values), 2 * INNER, dtype=HALF)
    multiply(rows, weight, out, ends, use_psum_layout=True)
    with pytest.raises(TypeError):
        multiply(rows, weight, out, ends, use_psum_layout=True, expected_m=3)
    for wrong in (
        ((rows[0].to(HALF), rows[1]), weight, out, ends),
        ((rows[0], rows[1][:, :1]), weight, out, ends),
        (rows, (weight[0], weight[1][:, :1]), out, ends),
        (rows, weight, out.float(), ends),
        (rows, weight, out[:-1], ends),
        (rows, weight, out, ends.long()),
        (rows, weight, out, ends + len(out)),
    ):
        with pytest.raises(AssertionError):
            multiply(*wrong, use_psum_layout=True)


def test_it_is_found_where_it_is_installed_and_knows_the_gpu(
    on_hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_found(chip: str) -> bool:
        on_hopper.setattr(scaled_expert_library, "chip_of", lambda _: CHIPS[chip])
        return find_scaled_expert_library(ON) is not None

    assert is_found("h100") and is_found("h200")
    assert not any(map(is_found, ("b200", "a100", "l40s", "mi300x")))
    del sys.modules["deep_gemm"].m_grouped_fp8_gemm_nt_contiguous
    assert not is_found("h100")
    assert "experts in fp8 are not computed by deep_gemm: it does not load (AttributeError" in caplog.text
    on_hopper.delitem(sys.modules, "deep_gemm")
    assert not is_found("h100")
    on_hopper.setattr(scaled_expert_library, "chip_of", chip_of)
    assert find_scaled_expert_library(ON) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("num_tokens", [1, 70, 3000])
def test_on_a_gpu_experts_are_those_of_our_kernels(num_tokens: int) -> None:
    library = find_scaled_expert_library(torch.device("cuda"))
    if library is None:
        pytest.skip("DeepGEMM does not compute here")
    x, weights, experts, *both = inputs(num_tokens, 1024, 768, 16)
    scaled = [ScaledWeight(of.values.to("cuda"), of.scales.to("cuda")) for of in both]
    given: Any = [*(of.to("cuda") for of in (x, weights, experts)), *scaled]
    assert library.takes(*given, SILU)
    due, found = moe_experts(*given).float(), library.compute(*given).float()
    assert (found - due).norm() <= 3e-2 * due.norm()
    assert not found[-1].any() and torch.equal(library.compute(*given).float(), found)
