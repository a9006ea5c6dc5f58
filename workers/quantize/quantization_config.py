"""The section `quantization_config` of a checkpoint that `diptych quantize` writes, as compressed-tensors has it
(https://github.com/vllm-project/compressed-tensors, quantization/quant_config.py)."""

from collections.abc import Sequence
from typing import Any

from ..models.plan.quantize_job import GPTQ, QuantizeJob

SCALE_DTYPES = {"mxfp4-pack-quantized": "torch.uint8", "nvfp4-pack-quantized": "torch.float8_e4m3fn"}


def quantization_config(job: QuantizeJob, group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """group: inputs that share a scale, where the format has groups. ignored: names of modules."""
    written = job.written
    weights: dict[str, Any] = {
        "num_bits": written.bits,
        "type": written.kind,
        "symmetric": True,
        "strategy": written.strategy,
        "dynamic": False,
    }
    if group:
        weights["group_size"] = group
    if written.format in SCALE_DTYPES:
        weights |= dict.fromkeys(("scale_dtype", "zp_dtype"), SCALE_DTYPES[written.format])
    if group and job.chosen_method == GPTQ and job.act_order:
        weights["actorder"] = "weight"  # groups are stored in order: readers need nothing for it
    activations = None
    if written.has_activations:
        activations = {
            "num_bits": written.bits,
            "type": written.kind,
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": written.format}
    return {
        "quant_method": "compressed-tensors",
        "format": written.format,
        "config_groups": {"group_0": scheme},
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
