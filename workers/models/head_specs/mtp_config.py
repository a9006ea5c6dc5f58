"""MtpConfig: what the config.json beside an MTP module says (DeepSeek-V3, arXiv 2412.19437, section 2.2), checked
against its target. Knows no tensor.

An MTP module is trained with its target and published in the target's checkpoint; its layer is one like the target's
last. A folder that holds the module alone has the target's config.json. speculators has that as
transformer_layer_config, beside speculators_model_type "mtp" (speculators/models/mtp/config.py).

The module is given the target's hidden state after the final norm: what vLLM's and SGLang's target models return
(`hidden_states, _ = self.norm(hidden_states, residual)` in vllm/model_executor/models/deepseek_v2.py).
"""

from dataclasses import dataclass, replace
from typing import Any, cast

from ...common.errors import ConfigError, UnsupportedArchitecture
from ..families.json_config import JsonFields
from ..families.quantisation import read_quantisation
from ..families.registry import load_spec
from ..families.spec import ModelSpec
from .eagle3_config import check_target, decoder_of, nested
from .head_spec import HeadSpec, HiddenState

GATED = ("Qwen3Next", "Qwen3_5", "qwen3_next", "qwen3_5")  # beginnings of architectures and of model_types


@dataclass(frozen=True, slots=True)
class MtpConfig:
    head: HeadSpec
    target: ModelSpec  # as config.json has it, all its layers


def read_mtp(config: JsonFields, target: ModelSpec) -> MtpConfig:
    """config: of the folder that holds the module. Raises CheckpointError, UnsupportedArchitecture, and ConfigError for
    a module of another target."""
    _refuse_gated(config)
    is_nested = "speculators_model_type" in config
    read_quantisation(config.path.parent)  # which is known before anything is opened
    own = decoder_of(*nested(config)) if is_nested else load_spec(config.path.parent)
    if "num_nextn_predict_layers" in config:
        config.size("num_nextn_predict_layers")
    last = own.layers[-1]
    if last.kv_from is not None or last.token_input is not None or own.embedding_scale != 1.0 or own.logit_softcap:
        raise UnsupportedArchitecture(f"{config.path}: MTP modules of {own.architecture} are not supported")
    decoder = replace(own, layers=(last,))
    head = HeadSpec("mtp", decoder, own.vocab_size, own.hidden_size, HiddenState.FINAL_NORMED)
    check_target(config.path, head, target)
    if own.num_layers != target.num_layers:
        raise ConfigError(
            f"{config.path}: the MTP module is for a target of {own.num_layers} layers, and {target.architecture} has "
            f"{target.num_layers}: give the module that was trained for this model"
        )
    return MtpConfig(head, own)


def _refuse_gated(config: JsonFields) -> None:
    """Refuse Qwen3-Next and its successors, whose attention has a gate of each output."""
    section = config.section("transformer_layer_config") or config
    architectures: Any = config.get("architectures")
    names = cast("list[Any]", architectures if isinstance(architectures, list) else [])
    for name in (*names, section.get("model_type")):
        if isinstance(name, str) and name.startswith(GATED):
            raise UnsupportedArchitecture(f"{config.path}: the gated attention of {name} is not supported")
