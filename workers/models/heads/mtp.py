"""MTP module as a draft head (DeepSeek-V3, arXiv 2412.19437, section 2.2): reads its tensors, computes its layer.

    forward   x = eh_proj([enorm(embedding), hnorm(hidden)]); x = layer(x)
    logits    head(norm(x))

The embeddings and the head are the target's, unless the module has its own. It drafts several tokens by being used
again, with what it returned; of several modules the first one is used. Names of tensors, and what is fed back:

    model.layers.{n}.{enorm, hnorm, eh_proj, shared_head.norm, ...}   x             DeepSeek-V3, GLM-4.5
    mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.0}    norm(x)  Qwen3-Next
    mtp_layers.0.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}  norm(x)  speculators

n is the number of the target's layers. Sources: vllm/model_executor/models/deepseek_mtp.py, glm4_moe_mtp.py and
qwen3_next_mtp.py; speculators/convert/mtp/converter.py. vLLM sets the embedding of the entry at position 0 to 0; the
paper and SGLang (deepseek_nextn.py) do not, and it is not done here.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from ....kernels.elementwise.rms_norm import rms_norm
from ...common.errors import UnsupportedArchitecture
from ...device.kv_cache import KVCache
from ...parallel.groups import Alone
from ..checkpoint.weights import LayerWeights
from ..families.spec import AttentionSpec, ModelSpec
from ..head_specs.head_fields import OPTIONAL
from ..head_specs.head_spec import HeadSpec
from ..head_specs.mtp_config import MtpConfig
from ..head_specs.mtp_tensors import mtp_fields, mtp_name, no_module
from ..layers.attention import StepMeta
from ..layers.layer import LayerRows, run_layers
from .draft_head import HeadParts, SharedWeights
from .head_files import HeadFiles
from .layer_run import head_layers


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """H: hidden size; V: vocabulary."""

    embed: Tensor  # [V, H]
    embed_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]
    joined: Tensor  # [H, 2 H]: eh_proj
    layer: LayerWeights
    norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]


class MtpHead:
    """A DraftHead."""

    def __init__(
        self, config: MtpConfig, weights: MtpWeights, first_kv_layer: int = 0, *, norm_output: bool = False
    ) -> None:
        """first_kv_layer: which layer of the cache is its own. norm_output: fed back is the normed hidden state."""
        self.config, self.weights, self._first_kv_layer = config, weights, first_kv_layer
        decoder = config.head.decoder
        self._eps, self._group, self._norm_output = decoder.rms_norm_eps, Alone(), norm_output
        self._layers = head_layers(decoder, [weights.layer], first_kv_layer)

    @property
    def spec(self) -> HeadSpec:
        return self.config.head

    @property
    def parts(self) -> HeadParts:
        own = self.weights
        return HeadParts(
            [own.layer],
            self._first_kv_layer,
            own.embed,
            own.embed_norm,
            own.hidden_norm,
            own.norm,
            own.lm_head,
            joined=own.joined,
            norms_output=self._norm_output,
        )

    def enter(self, aux: Tensor) -> Tensor:
        """See DraftHead."""
        return aux

    def forward(self, token_ids: Tensor, hidden: Tensor, cache: KVCache, meta: StepMeta) -> Tensor:
        """See DraftHead."""
        own, eps = self.weights, self._eps
        embedded = rms_norm(embedding(token_ids, own.embed), own.embed_norm, eps)
        residual = linear(torch.cat((embedded, rms_norm(hidden, own.hidden_norm, eps)), dim=1), own.joined)
        left = run_layers(self._layers, LayerRows(residual, meta), cache, self._group).hidden
        if left is not None:
            residual.add_(left)
        return rms_norm(residual, own.norm, eps) if self._norm_output else residual

    def logits(self, hidden: Tensor) -> Tensor:
        """See DraftHead."""
        normed = hidden if self._norm_output else rms_norm(hidden, self.weights.norm, self._eps)
        return linear(normed, self.weights.lm_head).float()

    def to_target(self, ids: Tensor) -> Tensor:
        """See DraftHead."""
        return ids


def load_mtp(
    folder: Path,
    config: MtpConfig,
    shared: SharedWeights,
    dtype: torch.dtype,
    device: torch.device,
    first_kv_layer: int = 0,
) -> MtpHead:
    """folder: may be the target's own. Raises CheckpointError and UnsupportedArchitecture, see mtp_config.py for what
    is checked before."""
    decoder = config.head.decoder
    [layer], outer = mtp_fields(decoder)
    with HeadFiles(folder, decoder, lambda stored: mtp_name(config.target, stored)) as files:
        if not files.has("eh_proj.weight"):
            raise no_module(folder, config.target)
        _refuse_gated(files, decoder)
        files.check_fields([layer], outer, OPTIONAL)
        found = {field: files.tensor(pieces, dtype, device) for field, pieces in outer.items()}
        weights = MtpWeights(
            embed=found.get("embed", shared.embed),
            embed_norm=found["embed_norm"],
            hidden_norm=found["hidden_norm"],
            joined=found["joined"],
            layer=files.layer(layer, dtype, device),
            norm=found["norm"],
            lm_head=found.get("lm_head", shared.lm_head),
        )
        norm_output = files.stored_name("eh_proj.weight").startswith("mtp")
    return MtpHead(config, weights, first_kv_layer, norm_output=norm_output)


def _refuse_gated(files: HeadFiles, decoder: ModelSpec) -> None:
    """Refuse a q_proj that makes a gate beside each query (Qwen3-Next)."""
    attention, name = decoder.layers[0].attention, "model.layers.0.self_attn.q_proj.weight"
    if not isinstance(attention, AttentionSpec) or files.header(name) is None:
        return
    if files.shape(name)[0] == 2 * attention.q_size:
        raise UnsupportedArchitecture(
            f"{files.folder}: tensor {files.stored_name(name)} has {2 * attention.q_size} rows where "
            f"{attention.q_size} make all queries: gated attention is not supported"
        )
