"""Checkpoints that `quantise` writes, and what compressed-tensors makes of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych.workers.models.plan.quantize_job import QuantizeJob
from diptych.workers.quantize.job import QuantisedCheckpoint, quantise

AVAILABLE = 4 << 30


def write(source: Path, out: Path, format: str, **more: Any) -> QuantisedCheckpoint:
    return quantise(QuantizeJob(str(source), str(out), format, **more), AVAILABLE)


def text_file(path: Path, seed: int = 0, num_words: int = 4000, vocab_size: int = 500) -> Path:
    """Numbers that `number_tokenizer` reads as tokens: Markov, so that inputs of layers have something in common."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 7, (num_words,), generator=generator)
    path.write_text(" ".join(str(int(n) % vocab_size) for n in steps.cumsum(0)))
    return path


def number_tokenizer(folder: Path, vocab_size: int = 500) -> None:
    """Write a tokenizer whose tokens are the numbers below `vocab_size`, by spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer: Any = Tokenizer(WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def decoded_by_library(packed: Path, plain: Path) -> Path:
    """Write the checkpoint of `packed` anew, in `plain`, with the weights that the library decodes, float32."""
    section = json.loads((packed / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(section)
    (group,) = config.config_groups.values()
    assert isinstance(group, QuantizationScheme)
    compressor: Any = BaseCompressor.get_value_from_registry(section["format"])
    stored = {name: tensor for path in packed.glob("*.safetensors") for name, tensor in load_file(path).items()}
    modules = {name.rpartition(".")[0] for name in stored if name.endswith(".weight_scale")}
    decoded = dict[str, Tensor]()
    for name, tensor in stored.items():
        if name.rpartition(".")[0] not in modules:
            decoded[name] = tensor.float()
    for module in modules:
        own = {name.rpartition(".")[2]: of for name, of in stored.items() if name.rpartition(".")[0] == module}
        decoded[f"{module}.weight"] = compressor.decompress(own, group)["weight"].float().contiguous()
    shutil.copytree(
        packed, plain, ignore=lambda _, names: [n for n in names if n.endswith(("safetensors", "index.json"))]
    )
    save_file(decoded, plain / "model.safetensors")
    plain_config = json.loads((packed / "config.json").read_text())
    del plain_config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(plain_config))
    return plain
