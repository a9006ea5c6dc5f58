"""Config of compressed-tensors checkpoints (https://github.com/vllm-project/compressed-tensors): groups of modules that
are quantised alike, which modules are in them, and how. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from .json_config import JsonFields
from .quantisation_fields import NamePattern, block_of, check_keys, group_size_of, one_of, patterns_of

LINEAR, EMBEDDING = "Linear", "Embedding"  # classes of modules that targets name


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
    KEYS: ClassVar = "targets weights input_activations output_activations format"
    # Of weights and activations: the library's QuantizationArgs.
    ARGS: ClassVar = (
        "num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype zp_dtype observer "
        "observer_kwargs"
    )

    targets: tuple[NamePattern, ...]  # names of modules, patterns, or classes of modules
    format: str
    bits: int
    kind: str  # see Kind
    strategy: str
    group_size: int  # inputs that share a scale; 0: not by groups
    block: tuple[int, int] | None  # outputs and inputs that share a scale
    is_symmetric: bool
    is_in_order: bool  # inputs of a group stand beside one another, whatever the tensors say
    quantises_rows: bool  # to int8 as they come, each by its own scale
    has_fp8_rows: bool  # made for rows that are FP8, by scales of whatever kind

    @classmethod
    def read(cls, fields: JsonFields, format: str) -> "SchemeGroup":
        """Raises CheckpointError."""
        check_keys(fields, cls.KEYS)
        weights = fields.section("weights")
        if weights is None:
            raise fields.error("weights", "must say how weights are quantised", None)
        for section in (weights, fields.section("input_activations"), fields.section("output_activations")):
            if section is not None:
                check_keys(section, cls.ARGS)
        size = weights.get("group_size")
        inferred = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = weights.get("strategy") or inferred
        return cls(
            targets=patterns_of(fields, "targets"),
            format=one_of(fields.with_defaults({"format": format}), "format", cls.FORMATS, format),
            bits=weights.size("num_bits", 8),
            kind=one_of(weights, "type", (Kind.INT, Kind.FLOAT), Kind.INT),
            strategy=one_of(weights.with_values({"strategy": strategy}), "strategy", cls.STRATEGIES),
            group_size=group_size_of(weights),
            block=block_of(weights, "block_structure"),
            is_symmetric=weights.flag("symmetric", True),
            is_in_order=weights.get("actorder") in (None, False, "weight", "static"),
            quantises_rows=_kind_of_rows(fields.section("input_activations")) == Kind.INT,
            has_fp8_rows=_kind_of_rows(fields.section("input_activations")) == Kind.FLOAT,
        )

    def has_class(self, name: str) -> bool:
        return any(of.is_exact and of.text == name for of in self.targets)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Method of llm-compressor and vLLM: https://github.com/vllm-project/compressed-tensors."""

    SPARSE: ClassVar = "sparse-24-bitmask"
    MARLIN: ClassVar = "marlin-24"
    KEYS: ClassVar = (
        "config_groups format global_compression_ratio ignore kv_cache_scheme moe_sparsity_config quant_method "
        "quantization_status run_compressed sparsity_config transform_config version"
    )

    groups: tuple[SchemeGroup, ...]
    ignored: tuple[NamePattern, ...]
    is_sparse: bool = False  # two of four neighbours are zero, of weights whose tensors say so

    @classmethod
    def read(cls, fields: JsonFields) -> "CompressedTensors":
        check_keys(fields, cls.KEYS)
        sparsity = fields.section("sparsity_config")
        is_sparse = sparsity is not None and one_of(sparsity, "format", ("dense", cls.SPARSE), "dense") == cls.SPARSE
        for name, what in (("transform_config", "transforms of weights"), ("moe_sparsity_config", "fewer experts")):
            if fields.section(name) is not None:
                raise fields.error(name, f"must be absent: {what} are not computed", "one")
        if (of_kv := fields.section("kv_cache_scheme")) is not None:
            check_keys(of_kv, SchemeGroup.ARGS)
        groups, format = fields.section("config_groups"), str(fields.get("format") or "dense")
        if groups is None:
            if is_sparse:
                return cls((), (), is_sparse)
            raise fields.error("config_groups", "must say what is quantised", None)
        sections = [(name, groups.section(name)) for name in groups.values]
        found = [SchemeGroup.read(of, str(of.get("format") or format)) for _, of in sections if of is not None]
        return cls(tuple(found), patterns_of(fields, "ignore"), is_sparse)

    @property
    def has_marlin(self) -> bool:
        return any(group.format == self.MARLIN for group in self.groups)

    def group_of(self, module: str) -> SchemeGroup | None:
        """The group of a module, by its name in the checkpoint; None: it is not quantised.

        As the library chooses, names come before patterns, patterns in the order of their texts, and classes last
        (compressed_tensors/utils/match.py). Raises CheckpointError for a pattern that takes too long.
        """
        if any(of.matches(module) for of in self.ignored):
            return None
        targets = [
            (not of.is_exact, of.text, group) for group in self.groups for of in group.targets if of.matches(module)
        ]
        if targets:
            return min(targets, key=lambda found: found[:2])[2]
        kind = EMBEDDING if module.rpartition(".")[2] == "embed_tokens" else LINEAR
        return next((of for of in self.groups if of.has_class(kind)), None)


def _kind_of_rows(activations: JsonFields | None) -> str | None:
    """Return the kind of the numbers of 8 bits that rows are quantised to as they come: of whole numbers by token and
    symmetric ones alone, of floats whatever their scales are; None: rows stay."""
    if activations is None or activations.size("num_bits", 8) != 8:
        return None
    kind = activations.get("type") or Kind.INT
    if kind == Kind.FLOAT:
        return Kind.FLOAT
    is_by_token = activations.get("strategy") == "token" and activations.get("dynamic") is True
    return Kind.INT if is_by_token and kind == Kind.INT and activations.flag("symmetric", True) else None
