"""The gated MLP of a decoder layer, of an expert, and of the experts that every token has (Shazeer 2020)."""

from torch import Tensor

from ....kernels.elementwise.gate_mul import GELU, GELU_TANH, SILU, SWIGLU_CLAMPED, gate_mul
from ....kernels.gemm.linear import Weight, linear
from ..families.spec import Activation

ACTIVATIONS: dict[Activation, int] = {
    "silu": SILU,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "swiglu_clamped": SWIGLU_CLAMPED,
}


def mlp(
    hidden: Tensor,
    activation: Activation,
    gate_up: Weight,
    down: Weight,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """hidden: [T, H]; gate_up: [2I, H], gate first, and its bias [2I]; down: [H, I] and [H]. Returns [T, H]."""
    return linear(gate_mul(linear(hidden, gate_up, gate_up_bias), ACTIVATIONS[activation]), down, down_bias)
