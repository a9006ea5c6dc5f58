"""Quantised checkpoints as their formats publish them, made from a plain one: by compressed-tensors' own compressors,
and for other formats by writers of ours, from whole numbers, so that the weights are known without reading them back.

A writer takes a module's weight [n, k] and returns its tensors by their short names, and the weight that they mean.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor, int], Written]  # weight, number of the module
LINEAR = ("_proj.weight",)


def quantised(
    source: Path, folder: Path, write: Writer, config: Mapping[str, Any], *, of: tuple[str, ...] = LINEAR
) -> tuple[Path, Path]:
    """Write a checkpoint of one file anew, with the weights whose names end in `of` quantised, and one with what these
    mean, in float32. Returns both folders."""
    packed_path, plain_path = folder / "packed", folder / "plain"
    for path in (packed_path, plain_path):
        shutil.copytree(source, path)
    packed, plain = dict[str, Tensor](), dict[str, Tensor]()
    for i, (name, tensor) in enumerate(sorted(load_file(source / "model.safetensors").items())):
        if not name.endswith(of):
            packed[name] = plain[name] = tensor.float() if tensor.is_floating_point() else tensor
            continue
        tensors, plain[name] = write(tensor.float(), i)
        module = name.removesuffix(".weight")
        packed |= {f"{module}.{short}": each.contiguous() for short, each in tensors.items()}
    for path, tensors in ((packed_path, packed), (plain_path, plain)):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    edit_config(packed_path, quantization_config=dict(config))
    return packed_path, plain_path


def edit_config(path: Path, **fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def groups_of(weight: Tensor, group: int) -> Tensor:
    """[n, k] -> [n, k / group, group]."""
    return weight.unflatten(1, (-1, group))


def compressed_tensors(format: str, **args: Any) -> tuple[Writer, dict[str, Any]]:
    """A writer by the library's own compressor, and its config. args: of the weights' QuantizationArgs."""
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=format)
    compressor: Any = BaseCompressor.get_value_from_registry(format)
    fp4, e4m3 = weights.type == "float" and weights.num_bits == 4, torch.float8_e4m3fn

    def write(weight: Tensor, _: int) -> Written:
        state = {"weight": weight} | _parameters(weight, weights, is_fp4=fp4)
        packed = compressor.compress(dict(state), scheme)
        if format == "nvfp4-pack-quantized":
            assert packed["weight_scale"].dtype == e4m3
        return packed, compressor.decompress(dict(packed), scheme)["weight"].float()

    section = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights.model_dump(mode="json")}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    return write, section


def by_activations(bits: int, group: int, *, is_packed: bool) -> tuple[Writer, dict[str, Any]]:
    """Groups in the order of activations (`actorder: group`), as compressed-tensors wrote it until 0.18: modules of as
    many inputs have one order. Packed with zero points, else without."""

    def write(weight: Tensor, i: int) -> Written:
        n, k = weight.shape
        middle, shape = 1 << (bits - 1), (n, k // group)
        of = (torch.arange(k) // group)[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        numbers, zeros, scales = drawn(i, (n, k), bits), drawn(500 + i, shape, bits), scales_of(i, shape)
        tensors = {"weight_scale": scales, "weight_g_idx": of.int()}
        if not is_packed:
            tensors["weight"] = (numbers - middle).to(torch.int8)
            return tensors, (numbers - middle).float() * scales.float()[:, of]
        tensors |= {"weight_packed": pack_stream(numbers, bits), "weight_zero_point": pack_stream(zeros.T, bits).T}
        tensors["weight_shape"] = torch.tensor([n, k])
        return tensors, (numbers - zeros[:, of]).float() * scales.float()[:, of]

    weights = {"num_bits": bits, "type": "int", "symmetric": not is_packed, "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | {"actorder": "group"}}}
    section = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    return write, section | {"format": "pack-quantized" if is_packed else "naive-quantized"}


def w8a8() -> tuple[Writer, dict[str, Any]]:
    """int8 by output, and rows that are quantised as they come."""
    write, config = compressed_tensors("int-quantized", num_bits=8, strategy="channel")
    rows = QuantizationArgs(num_bits=8, strategy="token", dynamic=True, symmetric=True)
    config["config_groups"]["group_0"]["input_activations"] = rows.model_dump(mode="json")
    return write, config


def fp8_with_rows() -> tuple[Writer, dict[str, Any]]:
    """FP8 by output, for rows of FP8."""
    write, config = compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel")
    rows = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True)
    config["config_groups"]["group_0"]["input_activations"] = rows.model_dump(mode="json")
    return write, config


def _parameters(weight: Tensor, args: QuantizationArgs, *, is_fp4: bool) -> dict[str, Tensor]:
    """Scales and zero points by minimum and maximum."""
    n, k = weight.shape
    if args.strategy == "block":
        assert args.block_structure is not None
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -k % wide, 0, -n % high))
        grouped = padded.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).transpose(1, 2).flatten(2)
    elif args.strategy in ("group", "tensor_group"):
        grouped = groups_of(weight, args.group_size or k)
    else:
        grouped = weight.reshape(1, 1, -1) if args.strategy == "tensor" else weight[:, None]
    low, high_ = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    largest = torch.maximum(-low, high_)
    if is_fp4:
        if args.group_size == 32:
            return {"weight_scale": torch.exp2(torch.floor(torch.log2(largest / 6)))}
        of_all = torch.tensor([448.0 * 6 / weight.abs().max()])
        return {"weight_scale": (of_all * largest / 6).to(torch.float8_e4m3fn).float(), "weight_global_scale": of_all}
    if args.type == "float":
        return {"weight_scale": largest / 448}
    levels = (1 << args.num_bits) - 1
    if args.symmetric:
        scales = largest / (levels / 2)
        return {"weight_scale": scales.reshape(1) if args.strategy == "tensor" else scales}
    scales = (high_ - low) / levels
    zeros = torch.round(-(1 << (args.num_bits - 1)) - low / scales).to(torch.int8)
    return {"weight_scale": scales, "weight_zero_point": zeros}


def drawn(i: int, shape: tuple[int, ...], bits: int) -> Tensor:
    """Whole numbers of `bits` bits."""
    generator = torch.Generator().manual_seed(i)
    return torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.int64)


def scales_of(i: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + i)
    return (torch.rand(shape, generator=generator) * 0.01 + 0.001).half()


def pack_stream(numbers: Tensor, bits: int) -> Tensor:
    """[n, k] whole numbers -> int32 [n, words]: a stream of bits, lowest first, written bit by bit."""
    n, k = numbers.shape
    stream = ((numbers[:, :, None] >> torch.arange(bits)) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -(k * bits) % 32)).unflatten(1, (-1, 32))
    words = (stream << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).view(n, -1)


def gptq(
    bits: int, group: int, *, is_v2: bool = False, is_symmetric: bool = False, ordered: bool = True, alike: bool = True
) -> tuple[Writer, dict[str, Any]]:
    """`ordered`: inputs stand in the order of their groups (no desc_act); else modules of as many inputs have them
    `alike`, as those that read the same inputs have."""

    def write(weight: Tensor, i: int) -> Written:
        n, k = weight.shape
        size = k if group == -1 else group
        numbers, scales = drawn(i, (n, k), bits), scales_of(i, (n, k // size))
        zeros = drawn(500 + i, (n, k // size), bits)
        if is_symmetric:
            zeros.fill_(1 << (bits - 1))
        of = torch.arange(k) // size
        if not ordered:
            of = of[torch.randperm(k, generator=torch.Generator().manual_seed(k if alike else i))]
        stored_zeros = zeros if is_v2 else (zeros - 1) % (1 << bits)
        tensors = {
            "qweight": pack_stream(numbers, bits).T,
            "qzeros": pack_stream(stored_zeros.T, bits),
            "scales": scales.T,
            "g_idx": of.int(),
        }
        return tensors, (numbers - zeros[:, of]).float() * scales.float()[:, of]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": is_symmetric, "desc_act": not ordered}
    return write, config | ({"checkpoint_format": "gptq_v2"} if is_v2 else {})


def awq(group: int, *, has_zeros: bool = True) -> tuple[Writer, dict[str, Any]]:
    """Without zero points they are written all the same, in the middle (auto-round)."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each nibble of a word, lowest first

    def pack(numbers: Tensor) -> Tensor:
        """[r, n] -> int32 [r, n / 8]."""
        words = (numbers.unflatten(1, (-1, 8))[:, :, list(order)] << (4 * torch.arange(8))).sum(-1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def write(weight: Tensor, i: int) -> Written:
        n, k = weight.shape
        numbers, zeros, scales = drawn(i, (k, n), 4), drawn(500 + i, (k // group, n), 4), scales_of(i, (k // group, n))
        zeros = zeros if has_zeros else torch.full_like(zeros, 8)
        tensors = {"qweight": pack(numbers), "qzeros": pack(zeros), "scales": scales}
        of = torch.arange(k) // group
        return tensors, ((numbers - zeros[of]).float() * scales.float()[of]).T

    return write, {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": has_zeros, "version": "gemm"}


def fp8_blocks(high: int, wide: int, scale_dtype: torch.dtype = torch.float32) -> tuple[Writer, dict[str, Any]]:
    def write(weight: Tensor, i: int) -> Written:
        n, k = weight.shape
        scales = torch.exp2(drawn(i, (-(-n // high), -(-k // wide)), 2) - 9.0)
        spread = scales.repeat_interleave(high, 0)[:n].repeat_interleave(wide, 1)[:, :k]
        numbers = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale_inv": scales.to(scale_dtype)}, numbers.float() * spread

    return write, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [high, wide]}


def fp8_tensor(*, by_transformers: bool = False) -> tuple[Writer, dict[str, Any]]:
    names = ("weight_scale_inv", "activation_scale") if by_transformers else ("weight_scale", "input_scale")

    def write(weight: Tensor, _: int) -> Written:
        scale = weight.abs().max() / 448
        numbers = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": numbers, names[0]: scale, names[1]: torch.ones(())}, numbers.float() * scale

    return write, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4_modelopt() -> tuple[Writer, dict[str, Any]]:
    def write(weight: Tensor, i: int) -> Written:
        n, k = weight.shape
        nibbles, of_all = drawn(i, (n, k), 4), torch.tensor(0.003)
        scales = (1 + drawn(500 + i, (n, k // 16), 3)).float().to(torch.float8_e4m3fn)
        pairs = nibbles.unflatten(1, (-1, 2))
        values = torch.tensor([*FP4, *(-value for value in FP4)])[nibbles]
        tensors = {
            "weight": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8),
            "weight_scale": scales,
            "weight_scale_2": of_all,
            "input_scale": torch.ones(()),
        }
        return tensors, values * (scales.float() * of_all).repeat_interleave(16, 1)

    return write, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}


def bitsandbytes(*, is_nested: bool) -> tuple[Writer, dict[str, Any]]:
    block, nested_block = 64, 16

    def write(weight: Tensor, i: int) -> Written:
        n, k = weight.shape
        num_blocks = -(-n * k // block)
        nibbles, means = drawn(i, (n * k,), 4), torch.linspace(-1, 1, 16)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [n, k]}
        scales = scales_of(i, (num_blocks,)).float()
        tensors = {"weight.absmax": scales}
        if is_nested:
            state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": 0.25}
            numbers, meant = drawn(900 + i, (num_blocks,), 8), torch.linspace(-1, 1, 256)
            of_all = scales_of(700 + i, (-(-num_blocks // nested_block),)).float()
            scales = meant[numbers] * of_all.repeat_interleave(nested_block)[:num_blocks] + 0.25
            tensors = {"weight.absmax": numbers.to(torch.uint8), "weight.nested_absmax": of_all}
            tensors["weight.nested_quant_map"] = meant
        pairs = nibbles.view(-1, 2)
        tensors |= {
            "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
            "weight.quant_map": means,
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
        return tensors, (means[nibbles] * scales.repeat_interleave(block)[: n * k]).view(n, k)

    return write, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def bitsandbytes_int8() -> tuple[Writer, dict[str, Any]]:
    def write(weight: Tensor, i: int) -> Written:
        numbers = (drawn(i, tuple(weight.shape), 8) - 128).to(torch.int8)
        largest = scales_of(i, (len(weight),)).float()
        tensors = {"weight": numbers, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
        return tensors, numbers.float() * (largest / 127)[:, None]

    return write, {"quant_method": "bitsandbytes", "load_in_8bit": True}


def sparse24(format: str | None = None, **args: Any) -> tuple[Writer, dict[str, Any]]:
    """As compressed-tensors wrote it until 0.12: the two largest of each four, after they are quantised, if at all."""
    inner, section = compressed_tensors(format, **args) if format is not None else (None, dict[str, Any]())

    def write(weight: Tensor, i: int) -> Written:
        n, k = weight.shape
        kept = torch.zeros(n, k // 4, 4, dtype=torch.bool)
        kept.scatter_(2, weight.unflatten(1, (-1, 4)).abs().topk(2).indices, True)
        mask = kept.flatten(1)
        tensors, meant = inner(weight * mask, i) if inner is not None else ({"weight": weight.half()}, None)
        dense = tensors.pop("weight")
        numbers = dense.view(torch.int8) if dense.element_size() == 1 else dense
        tensors["compressed"] = numbers[mask].reshape(n, k // 2).view(dense.dtype)
        bits = torch.nn.functional.pad(mask, (0, -k % 8)).unflatten(1, (-1, 8))
        tensors["bitmask"] = (bits << torch.arange(8)).sum(-1).to(torch.uint8)
        tensors["shape"] = torch.tensor([[n], [k]])
        return tensors, (dense * mask).float() if meant is None else meant

    sparsity = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"], "ignore": []}
    return write, {"quant_method": "compressed-tensors", "format": "dense"} | section | {"sparsity_config": sparsity}


def torchao(
    *, bits: int = 8, group: int = 0, is_float: bool = False, by_tensor: bool = False
) -> tuple[Writer, dict[str, Any]]:
    """As transformers 5 saves what torchao 0.18 makes. group: 0: all inputs."""
    kinds = {8: "Int8WeightOnlyConfig", 4: "IntxWeightOnlyConfig"}
    kind = "Float8WeightOnlyConfig" if is_float else kinds[bits]

    def write(weight: Tensor, i: int) -> Written:
        n, k = weight.shape
        if is_float:
            scale = scales_of(i, (1, 1) if by_tensor else (n, 1)).float()
            numbers = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            return {"_weight_qdata": numbers, "_weight_scale": scale}, numbers.float() * scale
        middle, shape = 1 << (bits - 1), (n, k // (group or k))
        numbers, zeros = drawn(i, (n, k), bits) - middle, drawn(500 + i, shape, bits) - middle
        scale = scales_of(i, shape).bfloat16() if group else scales_of(i, shape).float()
        tensors = {"_weight_qdata": numbers.to(torch.int8), "_weight_scale": scale}
        tensors["_weight_zero_point"] = zeros.to(torch.int8)
        each = (of.repeat_interleave(group or k, 1) for of in (zeros, scale.float()))
        return tensors, (numbers - next(each)).float() * next(each)

    return write, {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": {}}}}


def torchao_int4(group: int) -> tuple[Writer, dict[str, Any]]:
    """An Int4Tensor, as fbgemm's int4_row_quantize_zp and pack_int4 make it: zero points are weights."""

    def write(weight: Tensor, i: int) -> Written:
        n, k = weight.shape
        numbers = drawn(i, (n, k), 4) - 8
        scales, zeros = scales_of(i, (n, k // group)).bfloat16(), scales_of(500 + i, (n, k // group)).bfloat16()
        packed = (numbers[:, ::2] & 15) | numbers[:, 1::2] << 4
        tensors = {"_weight_qdata": packed.to(torch.int8), "_weight_scale": scales.T, "_weight_zero_point": zeros.T}
        each = (of.float().repeat_interleave(group, 1) for of in (scales, zeros))
        return tensors, numbers.float() * next(each) + next(each)

    data = {"group_size": group, "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"}}
    kind = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": data}
    return write, {"quant_method": "torchao", "quant_type": {"default": kind}}


def mxfp4_experts(source: Path, folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint of gpt-oss anew, its experts as published, and one with what these mean. Returns both."""
    packed_path, plain_path = folder / "packed", folder / "plain"
    for path in (packed_path, plain_path):
        shutil.copytree(source, path)
    packed, plain = dict[str, Tensor](), dict[str, Tensor]()
    for i, (name, tensor) in enumerate(sorted(load_file(source / "model.safetensors").items())):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = plain[name] = tensor
            continue
        num, k, n = tensor.shape
        nibbles, exponents = drawn(i, (num, n, k // 32, 32), 4), 120 + drawn(500 + i, (num, n, k // 32), 2)
        values = torch.tensor([*FP4, *(-value for value in FP4)])[nibbles] * torch.exp2(exponents - 127.0)[..., None]
        pairs = nibbles.unflatten(3, (-1, 2))
        packed[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
        packed[f"{name}_scales"] = exponents.to(torch.uint8)
        plain[name] = values.flatten(2).mT.contiguous()
    for path, tensors in ((packed_path, packed), (plain_path, plain)):
        save_file(tensors, path / "model.safetensors")
    edit_config(packed_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return packed_path, plain_path
