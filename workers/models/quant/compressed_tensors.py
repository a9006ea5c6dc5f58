"""Weights of compressed-tensors checkpoints (https://github.com/vllm-project/compressed-tensors): whole numbers and
floats of 8 bits, numbers of 1 to 8 bits in words, NVFP4 and MXFP4.

    int-quantized, float-quantized   weight [n, k]; weight_scale [1], [n, 1], [n, groups] or [blocks of n, of k]
    pack-quantized                   weight_packed int32 [n, words]; weight_zero_point int32 [words of n, groups]
    nvfp4-pack-quantized             weight_packed uint8 [n, k / 2]; weight_scale e4m3 [n, k / 16]; weight_global_scale
    mxfp4-pack-quantized             weight_packed uint8 [n, k / 2]; weight_scale uint8, E8M0, [n, k / 32]

A weight is (number - zero point) x scale; with NVFP4, number x scale / global scale. Activations that such a checkpoint
quantises are not quantised here.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....kernels.cpu.formats import Format
from ....kernels.cpu.linear import WeightNumbers
from ...common.errors import CheckpointError
from ..families.compressed_config import CompressedTensors, Kind, SchemeGroup
from ..plan.number_layouts import MXFP4_GROUP, number_layout
from ..plan.tensor_names import Shape
from .bits import FP4, nibbles, num_words, scales_of_exponents, unpack_fp4, unpack_words
from .stored_weight import (
    FLOATS,
    Rows,
    StoredNumbers,
    StoredTensors,
    StoredWeight,
    bytes_of_fp8,
    check_divides,
    checked_scales,
    floats_of_fp8,
    in_bytes,
    need,
    order_of_groups,
    scaled,
    some_rows,
    whole,
)

E4M3 = "F8_E4M3"
SPARE = (
    "activation_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "q_scale",
)
_PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale")


@dataclass(frozen=True, slots=True)
class CompressedTensorsFormat:
    """A WeightFormat."""

    config: CompressedTensors

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        module = name.removesuffix(".weight")
        is_linear = name.endswith(".weight") and len(shape) == 2
        if not is_linear or not self._is_quantised(tensors, module):
            return None  # an embedding, or a module that the method calls by another class
        # A config has the names of its files, or those that the model has once it is loaded.
        stored = tensors.stored_name(f"{module}.weight_scale").removesuffix(".weight_scale")
        known = module if self.config.group_of(stored) is None else stored
        group = self.config.group_of(known)
        if group is None:
            raise CheckpointError(
                f"{tensors.where(name)}: weight {name} is quantised, but config.json has no group for it"
            )
        weight = _CompressedWeight(tensors, module, shape, group)
        names = [f"{module}.{of}" for of in ("weight", *_PACKED)]
        found, rows = tuple(of for of in names if tensors.header(of) is not None), weight.rows()
        layout, groups = number_layout(self.config, known, shape[1]), weight.groups_of_inputs()
        if layout is None or (groups is not None and order_of_groups(groups, group.group_size) is None):
            return StoredWeight(shape, found, rows)
        read = weight.in_table if layout.format == Format.TABLE4 else weight.numbers
        own = replace(layout, has_order=groups is not None)
        return StoredWeight(shape, found, rows, StoredNumbers(own, lambda _, of: read(of), weight.order))

    def is_spare(self, _tensors: StoredTensors, name: str, /) -> bool:
        return name.rpartition(".")[2] in SPARE

    def _is_quantised(self, tensors: StoredTensors, module: str) -> bool:
        """Return whether a module's weight is stored in few bits, perhaps without all that belongs to it."""
        header = tensors.header(f"{module}.weight")
        others = (f"{module}.weight_scale", f"{module}.weight_packed")
        is_few = header is not None and header.dtype in ("I8", E4M3)
        return is_few or any(tensors.header(name) is not None for name in others)


@dataclass(frozen=True, slots=True)
class _CompressedWeight:
    tensors: StoredTensors
    module: str
    shape: Shape  # [n, k]
    group: SchemeGroup

    def rows(self) -> Rows:
        """Check the tensors; return what decodes them. Raises CheckpointError."""
        zeros = self.tensors.header(self.name("weight_zero_point"))
        is_nothing = zeros is None or (
            zeros.dtype == "I8" and not whole(self.tensors, self.name("weight_zero_point")).any()
        )
        if self.group.is_symmetric and not is_nothing:
            raise self._wrong("has zero points (weight_zero_point), though config.json says symmetric: true")
        by_format = {
            "pack-quantized": self._packed,
            "nvfp4-pack-quantized": self._nvfp4,
            "mxfp4-pack-quantized": self._mxfp4,
        }
        return by_format.get(self.group.format, self._plain)()

    def order(self) -> Tensor | None:
        """Return the order that StoredNumbers has; None too for groups of unlike sizes, which have none."""
        groups = self.groups_of_inputs()
        return None if groups is None else order_of_groups(groups, self.group.group_size)

    def numbers(self, of: slice) -> WeightNumbers:
        """Whole numbers of 8 bits or fewer, or the bits of FP8."""
        order = self.order()
        zeros = None if self.group.is_symmetric else self._zeros(of)
        if self.group.format == "pack-quantized":
            bits, k = self.group.bits, self.shape[1]
            middle = 1 << (bits - 1)

            def unpacked(rows: slice) -> Tensor:
                stored = unpack_words(some_rows(self.tensors, self.name("weight_packed"), rows), bits, k) - middle
                return stored if order is None else stored[:, order]

            found = in_bytes(of, k, unpacked)
            zeros = None if zeros is None else zeros - middle
        else:
            found = some_rows(self.tensors, self.name("weight"), of)
            if self.group.kind == Kind.FLOAT:
                found = bytes_of_fp8(self.tensors, self.name("weight"), found)
            found = found if order is None else found[:, order]
        scales = self._by_row(self._scales(of), of)
        offsets = None if zeros is None else -self._by_row(zeros, of) * scales
        return WeightNumbers(found, scales, offsets, order=order)

    def in_table(self, of: slice) -> WeightNumbers:
        """Floats of 4 bits."""
        codes = nibbles(some_rows(self.tensors, self.name("weight_packed"), of))
        scales = self._nvfp4_scales(of) if self.group.format.startswith("nvfp4") else self._mxfp4_scales(of)
        return WeightNumbers(codes, scales, None, FP4)

    def _by_row(self, of_groups: Tensor, rows: slice) -> Tensor:
        """of_groups: what `_of_rows` gives. Returns a number for each row and group of inputs."""
        if self.group.strategy == "tensor":
            return of_groups.reshape(1, 1).expand(rows.stop - rows.start, 1)
        return self._rows_of_blocks(of_groups, rows) if self.group.strategy == "block" else of_groups

    def name(self, short: str) -> str:
        return f"{self.module}.{short}"

    def _plain(self) -> Rows:
        dtype = "I8" if self.group.kind == Kind.INT else E4M3
        need(self.tensors, self.name("weight"), [self.shape], [dtype])
        self._need_scales(FLOATS)
        if has_zeros := not self.group.is_symmetric:
            need(self.tensors, self.name("weight_zero_point"), self._scale_shapes(), ["I8"])

        def rows(of: slice) -> Tensor:
            groups = self.groups_of_inputs()
            stored = some_rows(self.tensors, self.name("weight"), of)
            is_int = self.group.kind == Kind.INT
            numbers = stored.float() if is_int else floats_of_fp8(self.tensors, self.name("weight"), stored)
            if has_zeros:
                numbers -= self._spread(self._zeros(of), of, groups)
            return numbers.mul_(self._spread(self._scales(of), of, groups))

        return rows

    def _packed(self) -> Rows:
        (n, k), bits = self.shape, self.group.bits
        if self.group.kind != Kind.INT or not 1 <= bits <= 8:
            raise self._wrong(f"has numbers of {bits} bits ({self.group.kind}); packed are whole ones of 1 to 8")
        need(self.tensors, self.name("weight_packed"), [(n, num_words(k, bits))], ["I32"])
        self._check_shape(self.name("weight_shape"))
        self._need_scales(FLOATS)
        has_zeros = not self.group.is_symmetric
        if has_zeros and self.group.strategy == "tensor":  # alone they are not packed
            need(self.tensors, self.name("weight_zero_point"), self._scale_shapes(), ["I8"])
        elif has_zeros:
            need(
                self.tensors,
                self.name("weight_zero_point"),
                [(num_words(n, bits), self._scale_shapes()[0][-1])],
                ["I32"],
            )
        middle = 1 << (bits - 1)  # numbers are stored from 0

        def rows(of: slice) -> Tensor:
            words = some_rows(self.tensors, self.name("weight_packed"), of)
            numbers, scales = unpack_words(words, bits, k).float(), self._scales(of)
            groups = self.groups_of_inputs()
            if self.group.strategy == "group" and groups is None:  # as below, without a number for each weight
                grouped = numbers.unflatten(1, (-1, self.group.group_size))
                grouped -= self._zeros(of)[:, :, None] if has_zeros else middle
                return grouped.mul_(scales[:, :, None]).flatten(1)
            numbers -= self._spread(self._zeros(of), of, groups) if has_zeros else middle
            return numbers.mul_(self._spread(scales, of, groups))

        return rows

    def _nvfp4(self) -> Rows:
        n, k = self.shape
        group = self.group.group_size or 16
        check_divides(self.tensors, self.name("weight"), group, k)
        self._refuse_order()
        need(self.tensors, self.name("weight_packed"), [(n, k // 2)], ["U8"])
        need(self.tensors, self.name("weight_scale"), [(n, k // group)], [E4M3])
        need(self.tensors, self.name("weight_global_scale"), [(1,), ()], ["F32"])

        def rows(of: slice) -> Tensor:
            numbers = unpack_fp4(some_rows(self.tensors, self.name("weight_packed"), of))
            return scaled(numbers, self._nvfp4_scales(of), group)

        return rows

    def _nvfp4_scales(self, of: slice) -> Tensor:
        global_name, name = self.name("weight_global_scale"), self.name("weight_scale")
        of_all = checked_scales(self.tensors, global_name, whole(self.tensors, global_name).reshape(()))
        if of_all == 0:
            raise self._wrong("has a global scale of 0")
        found = checked_scales(self.tensors, name, some_rows(self.tensors, name, of)) / of_all
        return checked_scales(self.tensors, global_name, found)  # the quotient may be too large for float32

    def _mxfp4(self) -> Rows:
        n, k = self.shape
        check_divides(self.tensors, self.name("weight"), MXFP4_GROUP, k)
        self._refuse_order()
        need(self.tensors, self.name("weight_packed"), [(n, k // 2)], ["U8"])
        need(self.tensors, self.name("weight_scale"), [(n, k // MXFP4_GROUP)], ["U8"])

        def rows(of: slice) -> Tensor:
            numbers = unpack_fp4(some_rows(self.tensors, self.name("weight_packed"), of))
            return scaled(numbers, self._mxfp4_scales(of), MXFP4_GROUP)

        return rows

    def _mxfp4_scales(self, of: slice) -> Tensor:
        name = self.name("weight_scale")
        return checked_scales(self.tensors, name, scales_of_exponents(some_rows(self.tensors, name, of)))

    def groups_of_inputs(self) -> Tensor | None:
        """The group of each input, [k]; None: they are in order. A group that is not there is an error."""
        name, k = self.name("weight_g_idx"), self.shape[1]
        if self.tensors.header(name) is None and self.group.is_in_order:
            return None
        need(self.tensors, name, [(k,)], ["I32", "I64"])
        found, size = whole(self.tensors, name).long(), self.group.group_size or k
        if (found == -1).all() or torch.equal(found, torch.arange(k) // size):
            return None  # the former is written where there is none
        if found.min() < 0 or found.max() >= k // size:
            raise CheckpointError(
                f"{self.tensors.where(name)}: tensor {name} must have groups from 0 to {k // size - 1}"
            )
        return found

    def _refuse_order(self) -> None:
        """Raise CheckpointError for floats of 4 bits in the order of activations, which their compressors leave out."""
        if self.groups_of_inputs() is not None:
            raise self._wrong("has inputs in the order of activations (weight_g_idx), which its format has not")

    def _scale_shapes(self) -> list[Shape]:
        (n, k), of = self.shape, self.group
        if of.strategy == "tensor":
            return [(1,), (), (1, 1)]
        if of.strategy == "channel":
            return [(n, 1)]
        if of.strategy == "block":
            if of.block is None:
                raise self._wrong("is quantised by blocks, but block_structure is missing")
            return [(-(-n // of.block[0]), -(-k // of.block[1]))]
        if not of.group_size:
            raise self._wrong("is quantised by groups, but group_size is missing")
        check_divides(self.tensors, self.name("weight"), of.group_size, k)
        return [(n, k // of.group_size)]

    def _need_scales(self, dtypes: tuple[str, ...]) -> None:
        need(self.tensors, self.name("weight_scale"), self._scale_shapes(), dtypes)

    def _scales(self, of: slice) -> Tensor:
        """Scales that these rows need."""
        return checked_scales(self.tensors, self.name("weight_scale"), self._of_rows("weight_scale", of))

    def _zeros(self, of: slice) -> Tensor:
        """Zero points that these rows need, float32. Packed they stand in columns, of which 32 fill whole words."""
        is_packed, bits, first = self.group.format == "pack-quantized", self.group.bits, of.start // 32
        if not is_packed or self.group.strategy == "tensor":
            return self._of_rows("weight_zero_point", of).float() + (1 << (bits - 1) if is_packed else 0)
        part = slice(first * bits, min(-(-of.stop // 32) * bits, num_words(self.shape[0], bits)))
        words = some_rows(self.tensors, self.name("weight_zero_point"), part)
        found = unpack_words(words.T.contiguous(), bits, of.stop - 32 * first)[:, of.start - 32 * first :]
        return found.T.float()

    def _of_rows(self, short: str, of: slice) -> Tensor:
        """A tensor with a number for each scale: all of it, or what these rows have."""
        name = self.name(short)
        has_rows = self.group.strategy not in ("tensor", "block")
        return some_rows(self.tensors, name, of) if has_rows else whole(self.tensors, name)

    def _spread(self, of_groups: Tensor, rows: slice, groups: Tensor | None = None) -> Tensor:
        """of_groups: what `_of_rows` gives; groups: of each input, where they are not in order. Returns a number for
        each of these rows' weights, [n or 1, k or 1]."""
        if self.group.strategy == "tensor":
            return of_groups.reshape(1, 1)
        if self.group.strategy == "block":
            assert self.group.block is not None
            wide = self.group.block[1]
            return self._rows_of_blocks(of_groups, rows).repeat_interleave(wide, dim=1)[:, : self.shape[1]]
        if groups is not None:
            return of_groups[:, groups]
        return of_groups if of_groups.shape[1] == 1 else of_groups.repeat_interleave(self.group.group_size, dim=1)

    def _rows_of_blocks(self, of_blocks: Tensor, rows: slice) -> Tensor:
        """A number for each of these rows and each block of inputs."""
        assert self.group.block is not None
        high, first = self.group.block[0], rows.start % self.group.block[0]
        chosen = of_blocks[rows.start // high : -(-rows.stop // high)].repeat_interleave(high, dim=0)
        return chosen[first : first + rows.stop - rows.start]

    def _check_shape(self, name: str) -> None:
        """Raise CheckpointError where the tensor that repeats the weight's shape contradicts it."""
        if self.tensors.header(name) is None:
            return
        need(self.tensors, name, [(2,)], ["I32", "I64"])
        found = whole(self.tensors, name).tolist()
        if found != list(self.shape):
            raise CheckpointError(
                f"{self.tensors.where(name)}: tensor {name} says {found}, but config.json makes it {list(self.shape)}"
            )

    def _wrong(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.tensors.where(self.name('weight'))}: weight {self.name('weight')} {why}")
