"""Configs of quantised weights: `quantization_config` of config.json, ModelOpt's hf_quant_config.json, or the metadata
of GGUF files. One class a method; which tensors a weight has, and what numbers they mean, is in a file a format
(quant/). No torch.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from ..gguf.gguf_config import architecture_of
from ..gguf.gguf_files import read_gguf
from .json_config import JsonFields, read_json_object
from .model_config import read_config

MODELOPT_FILE = "hf_quant_config.json"


class Kind:
    """Kind of the numbers that weights are stored as."""

    INT, FLOAT = "int", "float"


@dataclass(frozen=True, slots=True)
class SchemeGroup:
    """Modules of a compressed-tensors checkpoint that are quantised alike."""

    FORMATS: ClassVar = (
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "pack-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "marlin-24",
    )
    STRATEGIES: ClassVar = ("tensor", "channel", "group", "tensor_group", "block")

    targets: tuple[str, ...]  # names of modules, "re:" and a regular expression, or classes of modules
    format: str
    bits: int
    kind: str  # see Kind
    strategy: str
    group_size: int  # inputs that share a scale; 0: not by groups
    block: tuple[int, int] | None  # outputs and inputs that share a scale
    is_symmetric: bool
    is_in_order: bool  # inputs of a group stand beside one another, whatever the tensors say
    quantises_rows: bool  # to int8 as they come, each by its own scale

    @classmethod
    def read(cls, fields: JsonFields, format: str) -> "SchemeGroup":
        """Raises CheckpointError."""
        weights = fields.section("weights")
        if weights is None:
            raise fields.error("weights", "must say how weights are quantised", None)
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
        return cls(
            targets=_targets(fields, "targets"),
            format=one_of(fields.with_defaults({"format": format}), "format", cls.FORMATS, format),
            bits=weights.size("num_bits", 8),
            kind=one_of(weights, "type", (Kind.INT, Kind.FLOAT), Kind.INT),
            strategy=one_of(weights.with_values({"strategy": strategy}), "strategy", cls.STRATEGIES),
            group_size=_group_size(weights),
            block=_block(weights, "block_structure"),
            is_symmetric=weights.flag("symmetric", True),
            is_in_order=weights.get("actorder") in (None, False, "weight", "static"),
            quantises_rows=_quantises_rows(fields.section("input_activations")),
        )

    def has(self, module: str) -> bool:
        return any(_is_module(target, module) for target in self.targets)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Method of llm-compressor and vLLM: https://github.com/vllm-project/compressed-tensors."""

    SPARSE: ClassVar = "sparse-24-bitmask"
    MARLIN: ClassVar = "marlin-24"

    groups: tuple[SchemeGroup, ...]
    ignored: tuple[str, ...]
    is_sparse: bool = False  # two of four neighbours are zero, of weights whose tensors say so

    @classmethod
    def read(cls, fields: JsonFields) -> "CompressedTensors":
        check_keys(
            fields,
            "config_groups format global_compression_ratio ignore kv_cache_scheme moe_sparsity_config quant_method "
            "quantization_status sparsity_config transform_config version",
        )
        sparsity = fields.section("sparsity_config")
        is_sparse = sparsity is not None and one_of(sparsity, "format", ("dense", cls.SPARSE), "dense") == cls.SPARSE
        if fields.section("transform_config") is not None:
            raise fields.error("transform_config", "must be absent: transforms of weights are not computed", "one")
        groups, format = fields.section("config_groups"), str(fields.get("format") or "dense")
        if groups is None:
            if is_sparse:
                return cls((), (), is_sparse)
            raise fields.error("config_groups", "must say what is quantised", None)
        sections = [(name, groups.section(name)) for name in groups.values]
        found = [SchemeGroup.read(of, str(of.get("format") or format)) for _, of in sections if of is not None]
        return cls(tuple(found), _targets(fields, "ignore"), is_sparse)

    @property
    def has_marlin(self) -> bool:
        return any(group.format == self.MARLIN for group in self.groups)

    def group_of(self, module: str) -> SchemeGroup | None:
        """The group of a module, by its name in the checkpoint; None: it is not quantised. Names before classes."""
        if any(_is_module(of, module) for of in self.ignored):
            return None
        named = [of for of in self.groups if of.has(module)]
        return named[0] if named else next((of for of in self.groups if "Linear" in of.targets), None)


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ (arXiv 2210.17323), as AutoGPTQ and GPTQModel publish it."""

    bits: int
    group_size: int  # 0: all inputs
    is_symmetric: bool
    is_v2: bool  # zeros are stored as they are; v1: less 1
    is_in_order: bool  # inputs of a group stand beside one another, whatever the tensors say

    @classmethod
    def read(cls, fields: JsonFields) -> "Gptq":
        format = one_of(fields, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        bits = fields.size("bits")
        if bits not in (2, 3, 4, 8):
            raise fields.error("bits", "must be 2, 3, 4 or 8", bits)
        if fields.get("dynamic"):
            raise fields.error("dynamic", "must be absent: one width serves all modules", fields.get("dynamic"))
        is_in_order = not fields.flag("desc_act", False) or fields.flag("static_groups", False)
        return cls(bits, _group_size(fields), fields.flag("sym", True), format == "gptq_v2", is_in_order)


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ (arXiv 2306.00978), as AutoAWQ publishes it."""

    group_size: int  # 0: all inputs
    has_zeros: bool

    @classmethod
    def read(cls, fields: JsonFields) -> "Awq":
        bits = fields.size("bits", 4)
        if bits != 4:
            raise fields.error("bits", "must be 4", bits)
        version = str(fields.get("version") or "gemm").lower()
        one_of(fields.with_values({"version": version}), "version", ("gemm",))
        return cls(_group_size(fields), fields.flag("zero_point", True))


@dataclass(frozen=True, slots=True)
class Fp8:
    """Weights in float8_e4m3fn with a scale for each block (DeepSeek-V3, arXiv 2412.19437, section 3.3), or one."""

    block: tuple[int, int] | None  # outputs and inputs that share a scale; None: all

    @classmethod
    def read(cls, fields: JsonFields) -> "Fp8":
        one_of(fields, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        return cls(_block(fields, "weight_block_size"))


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts of gpt-oss in MXFP4 (OCP Microscaling Formats v1.0, section 5): 32 numbers of 4 bits share a scale."""

    @classmethod
    def read(cls, _fields: JsonFields) -> "Mxfp4":
        return cls()


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """NVIDIA ModelOpt's FP8 (one scale a weight) and NVFP4 (a scale for 16 inputs, and one for all)."""

    ALGORITHMS: ClassVar = ("FP8", "NVFP4")

    algorithm: str
    group_size: int

    @classmethod
    def read(cls, fields: JsonFields) -> "ModelOpt":
        algorithm = one_of(fields, "quant_algo", cls.ALGORITHMS)
        return cls(algorithm, fields.size("group_size", 16))


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """Weights in 8 or 4 bits by bitsandbytes; each weight's tensors say which."""

    bits: int  # of most

    @classmethod
    def read(cls, fields: JsonFields) -> "BitsAndBytes":
        return cls(8 if fields.flag("load_in_8bit", False) else 4)


@dataclass(frozen=True, slots=True)
class TorchAo:
    """torchao's classes of weights that have a plain layout (formats/torchao.py); tensors say which."""

    READ: ClassVar = (
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

    @classmethod
    def read(cls, fields: JsonFields) -> "TorchAo":
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
            one_of(of, "_type", cls.READ)
            return
        data = of.section("_data")
        for name in data.values if data is not None else ():
            modules = data.section(name) if data is not None and isinstance(data.get(name), dict) else None
            for module in modules.values if modules is not None else ():
                cls._check(modules.section(module) if modules is not None else None)


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


def one_of(fields: JsonFields, name: str, known: tuple[str, ...], default: str | None = None) -> str:
    value = fields.get(name)
    value = default if value is None else value
    if value not in known:
        raise fields.error(name, f"must be one of {', '.join(known)}", value)
    return cast("str", value)


def texts(fields: JsonFields, name: str) -> tuple[str, ...]:
    """A list of texts; absent: an empty one."""
    values: Any = fields.get(name) or []
    if not isinstance(values, list) or not all(isinstance(v, str) for v in cast("list[Any]", values)):
        raise fields.error(name, "must be a list of texts", cast("object", values))
    return tuple(cast("list[str]", values))


def check_keys(fields: JsonFields, known: str) -> None:
    """known: names, by spaces. Raises CheckpointError for others, which may change what the tensors mean."""
    for name in fields.values:
        if name not in known.split():
            raise fields.error(name, f"is not known here; known are {', '.join(known.split())}", fields.get(name))


def _group_size(fields: JsonFields) -> int:
    """0 where all inputs of an output share its scale: absent, or -1."""
    return 0 if fields.get("group_size") in (None, -1) else fields.size("group_size")


def _block(fields: JsonFields, name: str) -> tuple[int, int] | None:
    value: Any = fields.get(name)
    if value is None:
        return None
    sizes = cast("list[Any]", value) if isinstance(value, list) else []
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise fields.error(name, "must be two sizes", cast("object", value))
    return sizes[0], sizes[1]


def _quantises_rows(activations: JsonFields | None) -> bool:
    if activations is None:
        return False
    kind = activations.size("num_bits", 8), activations.get("type") or Kind.INT, activations.get("strategy")
    return kind == (8, Kind.INT, "token") and activations.get("dynamic") is True and activations.flag("symmetric", True)


def _targets(fields: JsonFields, name: str) -> tuple[str, ...]:
    """Names of modules, or "re:" and a regular expression. Raises CheckpointError for one that is none."""
    found = texts(fields, name)
    for target in found:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as e:
            raise fields.error(name, f"must hold regular expressions after re: ({e})", target) from e
    return found


def _is_module(target: str, module: str) -> bool:
    return re.match(target[3:], module) is not None if target.startswith("re:") else target == module
