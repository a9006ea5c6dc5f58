"""Experts by FlashInfer in place of our kernels: by a fake that is as strict, and on a GPU where it is installed."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.common.tuning import CHIPS, chip_of
from diptych.kernels.elementwise.gate_mul import GELU, SILU, SILU_UP_FIRST
from diptych.kernels.moe import expert_library
from diptych.kernels.moe.expert_library import FlashInferExperts, find_expert_library
from diptych.kernels.moe.moe import moe_experts

from ...support.gpu.fake_flashinfer import make_flashinfer

HALF, ON = torch.bfloat16, torch.device("cpu")
NUM_EXPERTS, DIM, INNER, TOP_K = 6, 64, 32, 2
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # the first five of moe_experts


@pytest.fixture(autouse=True)
def on_hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    if request.node.get_closest_marker("gpu") is not None:  # with what is there
        return monkeypatch
    for name, module in make_flashinfer().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(expert_library, "chip_of", lambda _: CHIPS["h200"])
    return monkeypatch


def inputs(num_tokens: int, dim: int = DIM, inner: int = INNER, num_experts: int = NUM_EXPERTS) -> Inputs:
    """Some choices are of experts that are not here, and a row is padding."""
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(HALF)

    experts = torch.rand(num_tokens, num_experts + 2, generator=generator).topk(TOP_K).indices
    experts = torch.where(experts < num_experts, experts, -1).int()
    experts[-1] = -1
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    x = normal(num_tokens, dim) * dim**0.5
    return x, weights, experts, normal(num_experts, 2 * inner, dim), normal(num_experts, dim, inner)


def gate_first(given: Inputs) -> Inputs:
    *tokens, up_gate, down = given
    return (*tokens, up_gate.roll(up_gate.shape[1] // 2, 1), down)  # type: ignore[return-value]


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 130])
def test_experts_are_those_of_our_kernels(num_tokens: int, has_shared: bool) -> None:
    given = inputs(num_tokens)
    shared = torch.randn(num_tokens, DIM, generator=torch.Generator().manual_seed(1)).to(HALF) if has_shared else None
    due = moe_experts(*gate_first(given), shared=shared, activation=SILU)
    ours = moe_experts(*given, shared=shared, activation=SILU_UP_FIRST)
    assert torch.equal(ours, due)
    found = moe_experts(*given, shared=shared, activation=SILU_UP_FIRST, library=FlashInferExperts())
    assert found.dtype == HALF and found.is_contiguous()
    torch.testing.assert_close(found, due, rtol=2e-2, atol=2e-2)
    idle = torch.zeros(DIM, dtype=HALF) if shared is None else shared[-1]
    assert torch.equal(found[-1], idle)


def test_what_it_does_not_know_is_ours() -> None:
    library, given = FlashInferExperts(), inputs(3)
    assert library.takes(*given, SILU_UP_FIRST)
    assert not library.takes(*given, SILU) and not library.takes(*given, GELU)

    def takes(place: int, changed: Any) -> bool:
        return library.takes(*given[:place], changed, *given[place + 1 :], SILU_UP_FIRST)  # type: ignore[call-arg]

    x, weights, experts, gate_up, down = given
    for place, of in enumerate(given):
        assert not takes(place, of.double())
        strided = torch.zeros(*of.shape[:-1], 2 * of.shape[-1], dtype=of.dtype)[..., : of.shape[-1]]
        assert not takes(place, strided)
        assert not takes(place, of[:, :1])
    assert not takes(2, experts.long()) and not takes(1, weights.to(HALF)) and not takes(4, down.float())
    assert not library.takes(x[:0], weights[:0], experts[:0], gate_up, down, SILU_UP_FIRST)
    assert not library.takes(*inputs(3, dim=60), SILU_UP_FIRST) and not library.takes(
        *inputs(3, inner=36), SILU_UP_FIRST
    )


def test_what_it_does_not_take_is_computed_here() -> None:
    given, biases = inputs(4), (torch.ones(NUM_EXPERTS, 2 * INNER, dtype=HALF), None)
    library = FlashInferExperts()
    for more in ({"biases": biases}, {"first_expert": 1}, {"activation": SILU}):
        arguments: dict[str, Any] = {"activation": SILU_UP_FIRST, **more}
        assert torch.equal(moe_experts(*given, **arguments, library=library), moe_experts(*given, **arguments))


def test_the_fake_is_strict() -> None:
    compute = make_flashinfer()["flashinfer.fused_moe"].cutlass_fused_moe
    x, weights, experts, gate_up, down = inputs(3)
    named = {"quant_scales": None, "enable_pdl": False, "use_fused_finalize": False}
    compute(x, experts, weights, gate_up, down, HALF, **named)
    with pytest.raises(TypeError):
        compute(x, experts, weights, gate_up, down, HALF, **named, gated=True)
    for wrong in (
        (x, experts.long(), weights, gate_up, down),
        (x, experts, weights.to(HALF), gate_up, down),
        (x.float(), experts, weights, gate_up, down),
        (x, experts, weights, gate_up[:, :INNER], down),
        (x[:2], experts, weights, gate_up, down),
        (x, experts, weights, gate_up.mT, down),
    ):
        with pytest.raises(AssertionError):
            compute(*wrong, HALF, **named)


def test_it_is_found_where_it_is_installed_and_knows_the_gpu(
    on_hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_found(chip: str) -> bool:
        on_hopper.setattr(expert_library, "chip_of", lambda _: CHIPS[chip])
        return find_expert_library(ON) is not None

    assert is_found("h100") and is_found("b200")
    assert not any(map(is_found, ("a100", "l40s", "mi300x")))
    del sys.modules["flashinfer.fused_moe"].cutlass_fused_moe
    assert not is_found("h100")
    assert "experts are not computed by flashinfer: it does not load (AttributeError" in caplog.text
    on_hopper.delitem(sys.modules, "flashinfer")
    assert not is_found("h100")
    on_hopper.setattr(expert_library, "chip_of", chip_of)
    assert find_expert_library(ON) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("num_tokens", [1, 70, 3000])
def test_on_a_gpu_experts_are_those_of_our_kernels(num_tokens: int) -> None:
    library = find_expert_library(torch.device("cuda"))
    if library is None:
        pytest.skip("FlashInfer does not compute here")
    given: Any = [of.to("cuda") for of in inputs(num_tokens, 1024, 768, 16)]
    assert library.takes(*given, SILU_UP_FIRST)
    due, found = moe_experts(*given, activation=SILU_UP_FIRST).float(), library.compute(*given).float()
    assert (found - due).norm() / due.norm() < 1e-2
    assert not found[-1].any() and torch.equal(library.compute(*given).float(), found)
