"""The shipped model in few bits, on text of its own kind that it was neither taught nor calibrated by."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diptych.examples.training.documents import Documents
from diptych.examples.training.facts import load_facts, load_words
from diptych.examples.training.packing import IGNORED, label, render
from diptych.kernels.elementwise.rms_norm import rms_norm
from diptych.workers.models.families.registry import load_spec
from diptych.workers.quantize.layer_runs import CPU, LayerRuns
from diptych.workers.quantize.overlaid_checkpoint import OverlaidCheckpoint

from .written import write

TINY = Path(__file__).parents[3] / "examples" / "tiny"
CALIBRATION_SEED, HELD_OUT_SEED = 1001, 2002


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = AutoTokenizer.from_pretrained(TINY)
    assert isinstance(made, PreTrainedTokenizerFast)
    return made


def texts(tokenizer: PreTrainedTokenizerFast, seed: int, num: int) -> Iterator[str]:
    words, rng = load_words(), random.Random(seed)
    stream = Documents(load_facts(words), words).stream(seed)
    return (render(next(stream), tokenizer, rng) for _ in range(num))


def log_likelihoods(path: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Of every token after the first, by what stands before it: float32 [T - 1, vocab] of each sequence."""
    spec = load_spec(path)
    with torch.inference_mode(), OverlaidCheckpoint(path, spec) as checkpoint:
        runs, reader = LayerRuns(checkpoint, sequences), checkpoint.reader(torch.float32, CPU)
        for fields in reader.layers():
            runs.advance(fields.as_layer())
        norm, head = reader.outer().tensor("norm"), reader.outer().tensor("embed")  # which are tied
        hidden = [rms_norm(residual[:-1], norm, spec.rms_norm_eps) for residual in runs.residuals]
        return [(of @ head.T).log_softmax(dim=-1) for of in hidden]


def quality(path: Path, sequences: list[list[int]], plain: list[torch.Tensor]) -> tuple[float, float]:
    """(perplexity of what the model was taught to say, share of tokens of which `plain` has the same first choice)."""
    loss, num_taught, num_same, num = 0.0, 0, 0, 0
    for ids, found, expected in zip(sequences, log_likelihoods(path, sequences), plain, strict=True):
        is_taught = torch.tensor(label(ids))[1:] != IGNORED
        loss -= float(found.gather(1, torch.tensor(ids)[1:, None])[is_taught].sum())
        num_taught += int(is_taught.sum())
        num_same += int((found.argmax(dim=1) == expected.argmax(dim=1)).sum())
        num += len(found)
    return float(torch.tensor(loss / num_taught).exp()), num_same / num


def test_gptq_is_better_than_rounding(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": of}) + "\n" for of in texts(tokenizer, CALIBRATION_SEED, 48)))
    sequences = [tokenizer.encode(of, add_special_tokens=False) for of in texts(tokenizer, HELD_OUT_SEED, 60)]
    write(TINY, tmp_path / "rtn", "int4")
    write(TINY, tmp_path / "gptq", "int4", calibrate=str(file), sequence_tokens=128)
    plain = log_likelihoods(TINY, sequences)
    best, _ = quality(TINY, sequences, plain)
    (gptq, gptq_same), (rtn, rtn_same) = (quality(tmp_path / of, sequences, plain) for of in ("gptq", "rtn"))
    assert best < gptq < rtn
    assert rtn_same + 0.003 < gptq_same < 1
