"""A quantisation: a checkpoint read, rounded and written anew, a layer at a time.

plan, memory  ->  [text through the embeddings]  ->  of each layer: [statistics -> scales]  round  write
[-> text through the layer as it is now]  ->  what is not quantised, copied  ->  config
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from ..models.checkpoint.weights import LayerTensors
from ..models.families.json_config import read_json_object
from ..models.plan.quantize_job import QuantizeJob
from ..models.plan.quantize_plan import WEIGHT, check_source, planned_weights
from ..models.plan.shards import read_index, shards
from .calibration_text import read_sequences
from .checkpoint_writer import SHARD_BYTES, CheckpointWriter, written_checkpoint
from .layer_quantiser import LayerQuantiser
from .layer_runs import CPU, LayerRuns
from .memory_needs import GIB, memory_needs, passes
from .overlaid_checkpoint import OverlaidCheckpoint
from .quantization_config import quantization_config

Note = Callable[[str], object]
HEAD_MODULE = "lm_head"


@dataclass(frozen=True, slots=True)
class QuantisedCheckpoint:
    """Sizes and error of a checkpoint that was written."""

    num_weights: int  # quantised matrices
    num_bytes: int  # of all tensors
    before_bytes: int
    relative_error: float  # see LayerQuantiser


def quantise(
    job: QuantizeJob, available: int, note: Note = lambda _: None, shard_bytes: int = SHARD_BYTES
) -> QuantisedCheckpoint:
    """Write what `job` asks for, whole or not at all. available: bytes of memory that may be used. note: told what is
    done. Raises DiptychErrors."""
    job.check()
    spec, group = check_source(job)
    path = Path(job.model)
    sequences: list[list[int]] = []
    if job.calibrate is not None:
        note("reading the text")
        sequences = read_sequences(
            path, Path(job.calibrate), job.samples, min(job.sequence_tokens, spec.longest_context), spec.vocab_size
        )
    lengths = [len(ids) for ids in sequences]
    with OverlaidCheckpoint(path, spec) as checkpoint, written_checkpoint(Path(job.out), shard_bytes) as writer:
        needs = memory_needs(spec, job, lengths, min(shard_bytes, checkpoint.num_bytes))
        statistics_bytes = needs.statistics_bytes(available)
        note(f"{sum(lengths):,} tokens, up to {(needs.fixed + statistics_bytes) / GIB:.2f} GiB")
        quantiser = LayerQuantiser(checkpoint, job, group)
        runs = LayerRuns(checkpoint, sequences) if sequences else None
        reader = checkpoint.reader(torch.float32, CPU)
        for i, fields in enumerate(reader.layers()):
            note(f"layer {i + 1} of {spec.num_layers}")
            _quantise_layer(quantiser, i, fields, runs, statistics_bytes, writer)
        ignored = _copy_others(checkpoint, quantiser, writer)
        config = read_json_object(path / "config.json")
        section = quantization_config(job, group, ignored)
        writer.finish(path, config | {"quantization_config": section})
        return QuantisedCheckpoint(
            quantiser.num_weights, writer.num_bytes, checkpoint.num_bytes, quantiser.relative_error
        )


def _quantise_layer(
    quantiser: LayerQuantiser,
    layer: int,
    fields: LayerTensors,
    runs: LayerRuns | None,
    statistics_bytes: int,
    writer: CheckpointWriter,
) -> None:
    """Write a layer's tensors, and move the text on."""
    weights = planned_weights(quantiser.spec, layer, quantiser.job)
    if runs is None:
        for name, tensor in quantiser.by_rounding(weights):
            writer.add(name, tensor)
        return
    before = fields.as_layer()
    for part in passes(weights, statistics_bytes):
        found = quantiser.statistics(layer, part)
        runs.gather(before, found)
        for name, tensor in quantiser.calibrated(layer, part, found):
            writer.add(name, tensor)
        del found
    del before
    runs.advance(fields.as_layer())
    quantiser.checkpoint.replaced.clear()


def _copy_others(checkpoint: OverlaidCheckpoint, quantiser: LayerQuantiser, writer: CheckpointWriter) -> list[str]:
    """Write the tensors that are as they were. Returns the names of modules among them that might be quantised."""
    ignored = {HEAD_MODULE}
    for file in shards(checkpoint.path, read_index(checkpoint.path)):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                is_matrix = len(tensors.get_slice(name).get_shape()) == 2 and name.endswith(WEIGHT)
                if is_matrix and name not in quantiser.quantised and "embed" not in name:
                    ignored.add(name.removesuffix(WEIGHT))
                if name not in quantiser.written:
                    writer.add(name, tensors.get_tensor(name))
    return sorted(ignored)
