"""Configs of quantised weights: `quantization_config` of config.json, ModelOpt's hf_quant_config.json, or the metadata
of GGUF files. One class a method (compressed_config.py has the largest); which tensors a weight has, and what numbers
they mean, is in a file a format (quant/). No torch.

A key that is not known may change what tensors mean, and is refused by name. Those that are known and not read say how
the weights were made, or which modules are quantised, as the tensors say too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..gguf.gguf_config import architecture_of
from ..gguf.gguf_files import read_gguf
from .compressed_config import CompressedTensors
from .json_config import JsonFields, read_json_object
from .model_config import read_config
from .quantisation_fields import block_of, check_keys, group_size_of, one_of

MODELOPT_FILE = "hf_quant_config.json"
# Keys of GPTQ's and AWQ's makers (AutoGPTQ, GPTQModel, AutoAWQ, auto-round) and of transformers.
_OF_WORDS = (
    "act_bits act_data_type act_dynamic act_group_aware act_group_size act_sym adapter amp autoround_version backend "
    "batch_size bits block_name_to_quantize cache_block_outputs checkpoint_format damp_auto_increment damp_percent "
    "data_type dataset desc_act disable_exllama do_fuse dynamic enable_minmax_tuning enable_norm_bias_tuning "
    "enable_quanted_input exllama_config format fuse_max_seq_len gptaq gradient_accumulate_steps group_size hyb_act "
    "is_marlin_format iters lm_head low_gpu_mem_usage lr max_input_length meta minmax_lr mock_quantization "
    "model_file_base_name model_free model_name_or_path model_seqlen module_name_preceding_first_block "
    "modules_in_block_to_quantize modules_to_fuse modules_to_not_convert mse not_use_best_mse nsamples pack_dtype "
    "pad_token_id parallel_packing provider quant_block_list quant_method rotation sampler scale_dtype seqlen "
    "static_groups super_bits super_group_size sym to_quant_block_names tokenizer train_bs true_sequential "
    "use_cuda_fp16 use_exllama"
)


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ (arXiv 2210.17323), as AutoGPTQ and GPTQModel publish it."""

    bits: int
    group_size: int  # 0: all inputs
    is_symmetric: bool | None  # None: the config does not say
    is_v2: bool  # zeros are stored as they are; v1: less 1
    is_in_order: bool  # inputs of a group stand beside one another, whatever the tensors say

    @classmethod
    def read(cls, fields: JsonFields) -> "Gptq":
        check_keys(fields, _OF_WORDS)
        bits = fields.size("bits")
        if bits not in (2, 3, 4, 8):
            raise fields.error("bits", "must be 2, 3, 4 or 8", bits)
        format = fields.get("checkpoint_format") or fields.get("format") or "gptq"  # older name, newer name
        one_of(fields.with_values({"checkpoint_format": format}), "checkpoint_format", ("gptq", "gptq_v2"))
        _check_words(fields)
        is_in_order = not fields.flag("desc_act", False) or fields.flag("static_groups", False)
        is_symmetric = None if fields.get("sym") is None else fields.flag("sym")
        return cls(bits, group_size_of(fields), is_symmetric, format == "gptq_v2", is_in_order)


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ (arXiv 2306.00978), as AutoAWQ publishes it."""

    group_size: int  # 0: all inputs
    has_zeros: bool

    @classmethod
    def read(cls, fields: JsonFields) -> "Awq":
        check_keys(fields, f"{_OF_WORDS} version zero_point")
        bits = fields.size("bits", 4)
        if bits != 4:
            raise fields.error("bits", "must be 4", bits)
        version = str(fields.get("version") or fields.get("format") or "gemm").lower()
        one_of(fields.with_values({"version": version}), "version", ("gemm",))
        if fields.get("backend") == "llm-awq":
            raise fields.error("backend", "must be autoawq: llm-awq packs otherwise", "llm-awq")
        _check_words(fields)
        return cls(group_size_of(fields), fields.flag("zero_point", True))


@dataclass(frozen=True, slots=True)
class Fp8:
    """Weights in float8_e4m3fn with a scale for each block (DeepSeek-V3, arXiv 2412.19437, section 3.3), or one."""

    KEYS: ClassVar = (
        "activation_scheme dequantize expert_dtype fmt ignore ignored_layers is_checkpoint_fp8_serialized "
        "kv_cache_quant_method kv_cache_quant_targets kv_cache_scheme modules_to_convert modules_to_not_convert "
        "quant_method scale_fmt weight_block_size"
    )

    block: tuple[int, int] | None  # outputs and inputs that share a scale; None: all

    @classmethod
    def read(cls, fields: JsonFields) -> "Fp8":
        check_keys(fields, cls.KEYS)
        one_of(fields, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        one_of(fields, "expert_dtype", ("fp8",), "fp8")
        return cls(block_of(fields, "weight_block_size"))


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts of gpt-oss in MXFP4 (OCP Microscaling Formats v1.0, section 5): 32 numbers of 4 bits share a scale."""

    KEYS: ClassVar = "dequantize modules_to_not_convert quant_method"

    @classmethod
    def read(cls, fields: JsonFields) -> "Mxfp4":
        check_keys(fields, cls.KEYS)
        return cls()


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """NVIDIA ModelOpt's FP8 (one scale a weight) and NVFP4 (a scale for 16 inputs, and one for all)."""

    ALGORITHMS: ClassVar = ("FP8", "NVFP4")
    KEYS: ClassVar = (
        "config_groups exclude_modules group_size has_zero_point ignore kv_cache_quant_algo kv_cache_scheme "
        "pre_quant_scale producer quant_algo quant_method"
    )

    algorithm: str
    group_size: int

    @classmethod
    def read(cls, fields: JsonFields) -> "ModelOpt":
        """fields: of quantization_config; or what hf_quant_config.json has below `quantization`."""
        check_keys(fields, cls.KEYS)
        algorithm = one_of(fields, "quant_algo", cls.ALGORITHMS)
        for name in ("has_zero_point", "pre_quant_scale"):
            if fields.flag(name, False):
                raise fields.error(name, "must be false: it is of other algorithms", True)
        return cls(algorithm, fields.size("group_size", 16))


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """Weights in 8 or 4 bits by bitsandbytes; each weight's tensors say which."""

    KEYS: ClassVar = (
        "_load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type "
        "bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules "
        "llm_int8_threshold load_in_4bit load_in_8bit quant_method"
    )

    bits: int  # of most

    @classmethod
    def read(cls, fields: JsonFields) -> "BitsAndBytes":
        check_keys(fields, cls.KEYS)
        return cls(8 if fields.flag("load_in_8bit", False) else 4)


@dataclass(frozen=True, slots=True)
class TorchAo:
    """torchao's classes of weights that have a plain layout (quant/torchao.py); tensors say which."""

    READ: ClassVar = (
        "Int4WeightOnlyConfig",
        "Int8WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Int8StaticActivationInt8WeightConfig",
        "IntxWeightOnlyConfig",
        "Int8DynamicActivationIntxWeightConfig",
        "Float8WeightOnlyConfig",
        "Float8DynamicActivationFloat8WeightConfig",
        "Float8StaticActivationFloat8WeightConfig",
    )
    BY_MODULE: ClassVar = ("FqnToConfig", "ModuleFqnToConfig")
    KEYS: ClassVar = (
        "include_input_output_embeddings modules_to_not_convert quant_method quant_type quant_type_kwargs "
        "untie_embedding_weights"
    )

    @classmethod
    def read(cls, fields: JsonFields) -> "TorchAo":
        check_keys(fields, cls.KEYS)
        if isinstance(fields.get("quant_type"), str):
            need = "must be an object: older checkpoints of torchao are pickles, which are not read"
            raise fields.error("quant_type", need, fields.get("quant_type"))
        types = fields.section("quant_type")
        if types is None:
            raise fields.error("quant_type", "must say how weights are quantised", None)
        for name in types.values:
            cls._check(types.section(name))
        return cls()

    @classmethod
    def _check(cls, of: JsonFields | None) -> None:
        """Raise CheckpointError for a class of weights that is not read; None: modules that are not quantised."""
        if of is None:
            return
        if of.get("_type") not in cls.BY_MODULE:
            if one_of(of, "_type", cls.READ) == cls.READ[0]:
                cls._check_packing(of)
            return
        data = of.section("_data")
        for name in data.values if data is not None else ():
            modules = data.section(name) if data is not None and isinstance(data.get(name), dict) else None
            for module in modules.values if modules is not None else ():
                cls._check(modules.section(module) if modules is not None else None)

    @staticmethod
    def _check_packing(of: JsonFields) -> None:
        """Raise CheckpointError for an Int4WeightOnlyConfig whose numbers are packed for one kind of device."""
        data = of.section("_data")
        found = None if data is None else data.get("int4_packing_format")
        named = found.get("_data") if isinstance(found, dict) else found
        if data is not None and named is not None and str(named).upper() != "PLAIN":
            raise data.error("int4_packing_format", "must be PLAIN: others are for one kind of device", named)


@dataclass(frozen=True, slots=True)
class Gguf:
    """Tensors of GGUF files, each of a type of its own."""

    architecture: str  # llama.cpp's name
    head_dim: int


Published = CompressedTensors | Gptq | Awq | Fp8 | Mxfp4 | ModelOpt | BitsAndBytes | TorchAo
Quantisation = Published | Gguf
METHODS: dict[str, type[Published]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "fp8": Fp8,
    "mxfp4": Mxfp4,
    "bitsandbytes": BitsAndBytes,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "torchao": TorchAo,
}


def read_quantisation(model_path: Path) -> Quantisation | None:
    """Return how the checkpoint in a folder says that its weights are quantised; None: they are not. Raises
    CheckpointError for what is not known, which lists what is."""
    whole = read_config(model_path)
    if (gguf := read_gguf(model_path)) is not None:
        return Gguf(architecture_of(gguf), whole.size("head_dim"))
    for of in (whole, whole.section("text_config")):
        if of is not None and (section := of.section("quantization_config")) is not None:
            if section.get("quant_method") is None and section.get("quant_algo") is not None:
                return ModelOpt.read(section)
            return METHODS[one_of(section, "quant_method", tuple(METHODS))].read(section)
    own = model_path / MODELOPT_FILE
    if not own.is_file():
        return None
    section = JsonFields(own, read_json_object(own)).section("quantization")
    return None if section is None or section.get("quant_algo") is None else ModelOpt.read(section)


def _check_words(fields: JsonFields) -> None:
    """Raise CheckpointError for what would change the numbers of GPTQ's and AWQ's words."""
    of_modules = fields.section("dynamic")
    if of_modules is not None and not all(name.startswith("-") for name in of_modules.values):
        need = "must only leave modules out (-: and a pattern): one width serves all that are quantised"
        raise fields.error("dynamic", need, dict(of_modules.values))
    if fields.get("adapter"):
        raise fields.error("adapter", "must be absent: adapters of weights are not added", fields.get("adapter"))
    one_of(fields, "pack_dtype", ("int32",), "int32")
