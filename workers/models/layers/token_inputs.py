"""Per-token inputs of every layer beside the residual (Gemma 4; Gemma 3n's per-layer embeddings).

before the layers   of a table of its own, and projected of the embeddings: P numbers for each token and layer
in each layer       residual += norm(out(act(gate(residual)) * these numbers))
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from ....kernels.elementwise.gate_mul import gate_mul
from ....kernels.elementwise.rms_norm import rms_norm
from ..checkpoint.weights import DecoderWeights, LayerWeights
from ..families.spec import ModelSpec, TokenInputSpec
from .mlp import ACTIVATIONS


def token_inputs(spec: ModelSpec, weights: DecoderWeights, looked_up: Tensor, embedded: Tensor) -> Tensor:
    """looked_up: [T, layers * P], of the table; embedded: [T, H], with the embeddings' scale. Returns [T, layers,
    P]."""
    own = spec.token_input
    assert own is not None and weights.token_mix is not None and weights.token_mix_norm is not None
    shape = (len(embedded), spec.num_layers, own.dim)
    projected = (linear(embedded, weights.token_mix) * spec.hidden_size**-0.5).view(shape)
    scale = looked_up.new_full((), own.dim**0.5)  # is rounded, as transformers does
    return (rms_norm(projected, weights.token_mix_norm, spec.rms_norm_eps) + (looked_up * scale).view(shape)) * 0.5**0.5


def of_token(spec: TokenInputSpec, weights: LayerWeights, residual: Tensor, given: Tensor, eps: float) -> Tensor:
    """residual: [T, H]; given: [T, P], the layer's. Returns what is to be added, [T, H]."""
    assert weights.token_gate is not None and weights.token_out is not None and weights.token_out_norm is not None
    gate_up = torch.cat((linear(residual, weights.token_gate), given), dim=1)
    gated = gate_mul(gate_up, ACTIVATIONS[spec.activation])
    return rms_norm(linear(gated, weights.token_out), weights.token_out_norm, eps)
