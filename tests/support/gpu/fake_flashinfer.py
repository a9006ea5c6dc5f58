"""FlashInfer without its kernels: signature and checks of cutlass_fused_moe as released (0.6.18, rows and weights of 16
bits), computed plainly.
"""

import importlib.machinery
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

TMA_BYTES = 16  # of which addresses and rows of what TMA reads are multiples


class ActivationType(IntEnum):
    Swiglu = 3


def cutlass_fused_moe(  # noqa: PLR0917 (as released)
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor] | None,
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    input_sf: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: ActivationType = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool = True,
    profile_ids: list[int] | None = None,
    workspace_buffer: Tensor | None = None,
    *,
    situ_beta: Tensor | None = None,
    situ_linear_beta: Tensor | None = None,
) -> list[Tensor]:
    """Sum of each token's experts. input: [T, H]; token_selected_experts: [T, top_k] int32, others than 0 to E - 1 add
    nothing; token_final_scales: [T, top_k] float32; fc1_expert_weights: [E, 2I, H], of each up, then gate;
    fc2_expert_weights: [E, H, I]."""
    assert quant_scales is fc1_expert_biases is fc2_expert_biases is input_sf is workspace_buffer is profile_ids is None
    assert swiglu_alpha is swiglu_beta is swiglu_limit is situ_beta is situ_linear_beta is None
    assert (tp_size, tp_rank, ep_size, ep_rank, cluster_size, cluster_rank) == (1, 0, 1, 0, 1, 0)
    assert not (enable_alltoall or use_deepseek_fp8_block_scale or use_w4_group_scaling or use_mxfp8_act_scaling)
    assert not (min_latency_mode or use_packed_weights or use_wfp4afp8_humming or use_fused_finalize or enable_pdl)
    assert activation_type == ActivationType.Swiglu and swizzled_input_sf and tune_max_num_tokens > 0
    x, ids, scales, first, second = (
        input,
        token_selected_experts,
        token_final_scales,
        fc1_expert_weights,
        fc2_expert_weights,
    )
    assert x.dtype == first.dtype == second.dtype == output_dtype and output_dtype in {torch.bfloat16, torch.float16}
    assert ids.dtype == torch.int32 and scales.dtype == torch.float32
    assert x.dim() == ids.dim() == scales.dim() == 2 and first.dim() == second.dim() == 3
    num_experts, dim, inner = second.shape
    assert len(x) == len(ids) > 0 and ids.shape == scales.shape
    assert first.shape[0] == num_experts and first.shape[1] == 2 * inner
    assert dim * x.element_size() % TMA_BYTES == inner * x.element_size() % TMA_BYTES == 0
    assert first.shape[2] == x.shape[1] == dim  # it looks at neither, nor at strides: it would read something else
    assert all(of.is_contiguous() for of in (x, ids, scales, first, second))
    assert all(of.data_ptr() % TMA_BYTES == 0 for of in (x, first, second))
    if output is None:
        output = torch.empty(len(x), dim, dtype=output_dtype, device=x.device)
    assert output.shape == (len(x), dim) and output.dtype == output_dtype and output.device == x.device
    found = torch.zeros(len(x), dim)
    for expert in range(num_experts):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        up, gate = (x[tokens].float() @ first[expert].float().mT).chunk(2, dim=1)
        act = (silu(gate) * up).to(x.dtype).float()
        found.index_add_(0, tokens, scales[tokens, choices, None] * (act @ second[expert].float().mT))
    output.copy_(found)
    return [output]


def make_flashinfer() -> dict[str, Any]:
    """Make its modules, by name, for `sys.modules`."""
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.fused_moe")
    for each in (package, module):
        each.__spec__ = importlib.machinery.ModuleSpec(each.__name__, None)
    module.cutlass_fused_moe = cutlass_fused_moe  # type: ignore[attr-defined]
    package.fused_moe = module  # type: ignore[attr-defined]
    return {each.__name__: each for each in (package, module)}
