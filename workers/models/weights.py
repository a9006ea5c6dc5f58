"""Reads a Hugging Face safetensors checkpoint into the tensors of a decoder.

Life of a load: locate the shards, open them (mmap: nothing is read yet), compare every name, shape and dtype with what
the ModelSpec needs, and only then copy tensor by tensor, fused and converted, reporting progress. Whatever is wrong
with a checkpoint is found before a weight is read, and named.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...kernels.cpu.formats import Format
from ..errors import CheckpointError
from ..quant.formats import format_of
from ..quant.stored import as_stored, scales_of_part
from .sharding import WHOLE, Share, layer_fields, outer_fields, part_of_piece, shape_of_part, stored_part
from .shards import INDEX_FILE, read_index, samples, shards
from .spec import ModelSpec
from .tensor_names import HEAD, Piece, Pieces, Shape, expected_tensors, own_name, spare_tensors

Progress = Callable[[int, int], None]  # bytes done, bytes in all
# Copies a tensor as stored into a contiguous one of its shape, on whatever device, of whatever dtype, and tells of the
# bytes that it is done with. It may still be under way when it returns: see gpu/upload.py.
Put = Callable[[Tensor, Tensor, Callable[[int], object]], object]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
STORED_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # safetensors' names of the dtypes that we convert from


@dataclass(slots=True)
class LayerWeights:
    """One layer. H hidden, I intermediate, D head_dim, N query heads, K key-value heads, E experts; of latent attention
    q_rank and kv_rank, P rotated and D other numbers of a query, V of a value."""

    # [(N + 2K) D, H]: queries, keys, values. Latent: [q_rank (or N (D + P)) + kv_rank + P, H]: latents of queries (or
    # these), latents, rotated keys.
    qkv: Tensor
    o: Tensor  # [H, N D]; latent: [H, N V]
    gate_up: Tensor | None = None  # [2I, H]: gate, up
    down: Tensor | None = None  # [H, I]
    input_norm: Tensor | None = None  # [H], before attention
    attention_out_norm: Tensor | None = None  # [H], after it
    mlp_norm: Tensor | None = None  # [H], before the MLP
    mlp_out_norm: Tensor | None = None  # [H], after it
    sinks: Tensor | None = None  # [N] float32
    q_norm: Tensor | None = None  # [D]; latent: [q_rank]
    k_norm: Tensor | None = None  # [D]; latent: [kv_rank]
    q_b: Tensor | None = None  # [N (D + P), q_rank]
    kv_b: Tensor | None = None  # [N (D + V), kv_rank], of each head what makes its keys, then its values
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    router: Tensor | None = None  # [E, H] float32
    router_bias: Tensor | None = None  # [E] float32
    choice_bias: Tensor | None = None  # [E] float32
    experts_gate_up: Tensor | None = None  # [E, 2I, H]: of each, gate, up
    experts_down: Tensor | None = None  # [E, H, I]
    experts_gate_up_bias: Tensor | None = None  # [E, 2I]
    experts_down_bias: Tensor | None = None  # [E, H]
    shared_gate_up: Tensor | None = None  # as gate_up, of the experts that every token has
    shared_down: Tensor | None = None


@dataclass(slots=True)
class DecoderWeights:
    """Of one share, whose part of the vocabulary is `vocab`."""

    embed: Tensor  # [vocab, H]
    layers: list[LayerWeights]
    norm: Tensor  # [H]
    lm_head: Tensor  # [vocab, H]; the same tensor as `embed` where they are tied


def put_now(target: Tensor, stored: Tensor, copied: Callable[[int], object]) -> None:
    """A Put."""
    target.copy_(stored)
    copied(stored.nbytes)


class Checkpoint:
    """An opened and fully checked checkpoint. Use as a context manager: it holds file mappings."""

    def __init__(self, model_path: Path, spec: ModelSpec) -> None:
        """Raises CheckpointError naming file, tensor, expected and found."""
        self.spec = spec
        self._files: dict[str, Any] = {}  # tensor name -> the open shard that holds it, for as long as it is named here
        self._paths: dict[str, Path] = {}
        self._stored: dict[str, str] = {}  # tensor name -> its name there
        self._read_from: set[Path] = set()
        self._open(model_path)
        self._rename()
        self._check(model_path)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(self.stored_bytes(name) for name in self._files)

    def fingerprint(self) -> str:
        """Hex name of the weights: blake2b over the spec, names, shapes, dtypes and a sample of each tensor's bytes.

        How the tensors are spread over files does not matter. Reads a few pages a tensor, whatever its size; not by
        mmap, whose faults read ahead by megabytes. Raises CheckpointError where a file cannot be read.
        """
        digest = blake2b(json.dumps(asdict(self.spec), sort_keys=True).encode(), digest_size=16)
        sampled: dict[str, bytes] = {}
        for path in set(self._paths.values()):
            sampled |= samples(path)
        for name in sorted(self._files):
            stored = self._slice(name)
            digest.update(f"{name} {stored.get_shape()} {stored.get_dtype()}".encode())
            digest.update(sampled[self._stored[name]])
        return digest.hexdigest()

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = lambda _done, _total: None,
        share: Share = WHOLE,
        quantize: str | None = None,
    ) -> DecoderWeights:
        """Copy what `share` holds of every tensor to `device` as `dtype`, those of a fused weight below one another."""
        return load_weights(self.reader(dtype, device, progress, share, quantize))

    def reader(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = lambda _done, _total: None,
        share: Share = WHOLE,
        quantize: str | None = None,
        put: Put = put_now,
    ) -> "Reader":
        """For whoever makes something else of each tensor than `load` does. quantize: see quant/formats.py; it needs
        what was put at once."""
        return Reader(self, dtype, device, progress, share, quantize, put)

    def read(self, piece: Piece, share: Share) -> Tensor:
        """What `share` holds of a piece, of the dtype that is stored but where it has an offset; on CPU."""
        part = stored_part(piece, share)
        stored = self._read(piece.name, part)
        if piece.transposed:
            stored = stored.mT
        if piece.order:
            heads = stored.reshape(-1, len(piece.order), *stored.shape[1:])
            stored = heads[:, list(piece.order)].reshape(stored.shape)
        return stored.float() + piece.offset if piece.offset else stored

    def _read(self, name: str, part: tuple[int | slice, ...]) -> Tensor:
        """The part of tensor `name`, as stored."""
        self._read_from.add(self._paths[name])
        spans = tuple(of if isinstance(of, int) else slice(of.start, of.stop) for of in part)
        steps = tuple(slice(None, None, of.step) for of in part if isinstance(of, slice))
        try:
            shape = self._slice(name).get_shape()
            if all(isinstance(of, slice) and range(n)[of] == range(n) for n, of in zip(shape, part, strict=True)):
                return self._files[name].get_tensor(self._stored[name])
            return self._slice(name)[spans][steps]
        except (SafetensorError, OSError) as e:
            raise CheckpointError(
                f"{self._paths[name]}: tensor {name} cannot be read ({e}): fetch the file again"
            ) from e

    def let_go(self) -> None:
        """Map anew what was read from: the pages of a mapping count as this process's memory for as long as it lasts.
        It does while a tensor of `read` lasts."""
        for path in self._read_from:
            shard = self._open_shard(path)
            self._files |= {name: shard for name in self._files if self._paths[name] == path}
        self._read_from.clear()

    def holds(self, name: str) -> bool:
        return name in self._files

    def stored_bytes(self, name: str) -> int:
        return math.prod(self._slice(name).get_shape()) * self.stored_size(name)

    def stored_size(self, name: str) -> int:
        """Bytes of one of its numbers."""
        return STORED_BYTES[self._slice(name).get_dtype()]

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(self._stored[name])

    def _open(self, model_path: Path) -> None:
        index = read_index(model_path)
        for path in shards(model_path, index):
            shard = self._open_shard(path)
            for name in shard.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if name in self._files:
                    raise CheckpointError(
                        f"{path}: tensor {name} is also in {self._paths[name].name}: keep one of them"
                    )
                self._files[name], self._paths[name] = shard, path
        for name, file_name in index.items():
            if name not in self._files or self._paths[name].name != file_name:
                raise CheckpointError(
                    f"{model_path / file_name}: tensor {name} is missing, though {INDEX_FILE} names it"
                )

    def _rename(self) -> None:
        """From here on, tensors go by the names that tensor_names.py gives them; those of no use to us are left out."""
        files, paths = self._files, self._paths
        self._files, self._paths = {}, {}
        for stored, shard in files.items():
            name = own_name(self.spec, stored)
            if name is None:
                continue
            if name in self._files:
                raise CheckpointError(
                    f"{paths[stored]}: tensor {stored} is also {self._stored[name]}: keep one of them"
                )
            self._files[name], self._paths[name], self._stored[name] = shard, paths[stored], stored

    def _open_shard(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{path} is not a complete safetensors file ({e}): fetch the file again") from e
        except RuntimeError as e:  # torch's own, of a mapping that the kernel refused
            raise CheckpointError(f"{path} cannot be mapped ({e}): free memory, or use a machine with more") from e

    def _check(self, model_path: Path) -> None:
        spare = spare_tensors(self.spec, self._files)
        expected = expected_tensors(self.spec)
        for name, shape in expected.items():
            if name in self._files:
                self._check_tensor(name, shape)
            elif not (name == HEAD and self.spec.tie_word_embeddings):
                raise CheckpointError(f"{model_path}: tensor {name} of shape {list(shape)} is in none of its files")
        for name in sorted(self._files.keys() - expected.keys() - spare):
            raise CheckpointError(
                f"{self._paths[name]}: tensor {name} is unexpected: {self.spec.architecture} as in config.json has none"
            )
        for name in spare:
            del self._files[name]

    def _check_tensor(self, name: str, shape: Shape) -> None:
        stored = self._slice(name)
        found, dtype = list(stored.get_shape()), stored.get_dtype()
        if found != list(shape):
            raise CheckpointError(f"{self._paths[name]}: tensor {name} must have shape {list(shape)}, found {found}")
        if dtype not in STORED_BYTES:
            raise CheckpointError(
                f"{self._paths[name]}: tensor {name} must have dtype {', '.join(STORED_BYTES)}, found {dtype}"
            )


class Reader:
    """Copies what one share of a decoder needs out of a checkpoint, layer by layer, and counts."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        share: Share,
        quantize: str | None = None,
        put: Put = put_now,
    ) -> None:
        assert quantize is None or put is put_now
        self.quantize = quantize
        self.spec = checkpoint.spec
        self._checkpoint, self._dtype, self._device, self._share = checkpoint, dtype, device, share
        self._progress, self._put = progress, put
        self._layers = [layer_fields(checkpoint.spec, i, share) for i in range(checkpoint.spec.num_layers)]
        self._outer = outer_fields(checkpoint.spec, has_head=checkpoint.holds(HEAD))
        self._done, self._total = 0, 0
        for fields in (*self._layers, self._outer):
            self._total += sum(self._bytes(piece) for pieces in fields.values() for piece in pieces)

    def layers(self) -> "Iterator[Fields]":
        self._progress(0, self._total)
        for fields in self._layers:
            yield Fields(self, fields)
            self._checkpoint.let_go()

    def outer(self) -> "Fields":
        return Fields(self, self._outer)

    def parts(self, pieces: Pieces) -> list[Tensor]:
        found: list[Tensor] = []
        for piece in pieces:
            stored = self._read(piece)
            found.append(stored.to(self._device, self._dtype_of(piece)).contiguous())  # no copy of what is so already
            self._count(stored.nbytes)
        return found

    def fused(self, pieces: Pieces) -> Tensor:
        """What is below one another in a field; those of experts along an axis of their own, the first."""
        shapes = [shape_of_part(piece, self._share) for piece in pieces]
        rows, dtype = sum(s[0] for s in shapes), self._dtype_of(pieces[0])
        target = torch.empty((rows, *shapes[0][1:]), dtype=dtype, device=self._device)
        start = 0
        for piece, own in zip(pieces, shapes, strict=True):
            stored = self._read(piece)
            self._put(target[start : start + own[0]], stored, self._count)
            start += own[0]
        num_experts = len({piece.expert for piece in pieces})
        return target if pieces[0].expert is None else target.unflatten(0, (num_experts, -1))

    def scales(self, pieces: Pieces, format: Format) -> Tensor | None:
        """Of the whole rows, where this share holds a part of their inputs; None: its rows are whole, or `format` has
        no scales. Reads one tensor whole at a time."""
        if format == Format.PLAIN or self._share == WHOLE or len(part_of_piece(pieces[0], self._share)) == 1:
            return None
        return torch.cat([self._scales(piece, format) for piece in pieces])

    def _scales(self, piece: Piece, format: Format) -> Tensor:
        whole = self._checkpoint.read(piece, WHOLE).to(self._device, self._dtype)
        return scales_of_part(whole, format, part_of_piece(piece, self._share)[1])

    def _count(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress(self._done, self._total)

    def _dtype_of(self, piece: Piece) -> torch.dtype:
        return torch.float32 if piece.is_wide else self._dtype

    def _read(self, piece: Piece) -> Tensor:
        """This share's part. What is offset is of the dtype that is wanted, so that one number says its bytes."""
        stored = self._checkpoint.read(piece, self._share)
        return stored.to(self._dtype_of(piece)) if piece.offset else stored

    def _bytes(self, piece: Piece) -> int:
        """Of what `_read` returns."""
        size = self._dtype_of(piece).itemsize if piece.offset else self._checkpoint.stored_size(piece.name)
        return size * math.prod(shape_of_part(piece, self._share))


class Fields:
    """The tensors of one layer, or of what is outside the layers, by the fields' names; each is read when asked for."""

    def __init__(self, reader: Reader, fields: dict[str, Pieces]) -> None:
        self._reader, self._fields = reader, fields

    def has(self, field: str) -> bool:
        return field in self._fields

    def parts(self, field: str) -> list[Tensor]:
        """The tensors that are below one another in `field`; it exists."""
        return self._reader.parts(self._fields[field])

    def tensor(self, field: str) -> Tensor:
        """A `field` that exists."""
        return self._reader.fused(self._fields[field])

    def fused(self, field: str) -> Tensor | None:
        return self.tensor(field) if self.has(field) else None

    def of_expert(self, expert: int) -> "Fields":
        """What of the experts' fields is that one's, under the same names."""
        own = {field: tuple(p for p in pieces if p.expert == expert) for field, pieces in self._fields.items()}
        return Fields(self._reader, {field: pieces for field, pieces in own.items() if pieces})

    def as_layer(self) -> LayerWeights:
        return LayerWeights(**{field: self.as_stored(field) for field in self._fields})

    def format(self, field: str) -> Format:
        return format_of(self._reader.quantize, field)

    def scales(self, field: str) -> Tensor | None:
        """Those that the tensors of `field` are quantised with, where they are not their own: float32 [n, groups]."""
        return self._reader.scales(self._fields[field], self.format(field))

    def as_stored(self, field: str) -> Tensor:
        """A `field` that exists, as its format leaves it."""
        return as_stored(self.tensor(field), self.format(field), self.scales(field))


def load_weights(reader: Reader) -> DecoderWeights:
    layers = [fields.as_layer() for fields in reader.layers()]
    outer = reader.outer()
    embed, norm, lm_head = (
        outer.tensor("embed"),
        outer.tensor("norm"),
        outer.as_stored("lm_head") if outer.has("lm_head") else None,
    )
    return DecoderWeights(embed, layers, norm, embed if lm_head is None else lm_head)
