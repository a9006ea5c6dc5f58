"""Steps of families' shapes by the compiled kernels and by torch, in turn.

    python -m benchmarks.engine.families [NAME ...]

Checkpoints are random, made by transformers in a temporary folder: 30 layers of the judged 135 M shape (hidden 576, 9
heads, 3 of them KV, of 64, MLP 1,536, vocabulary 49,152), as each family has them. What is told is engine.py's: the
median time of a decode's step, or the time to the first token of a prompt.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.server.worker import load_runner

from .engine import LOADS, ours, prompts

SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
# Of each: transformers' classes, and what its config says beside SHAPE.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 128, "query_pre_attn_scalar": 64}),
}
LOADED = ("decode-1", "decode-16", "decode-32", "prefill-512")


def make_checkpoint(path: Path, family: str) -> None:
    config_class, model_class, changes = FAMILIES[family]
    torch.manual_seed(0)
    model: Any = getattr(transformers, model_class)(getattr(transformers, config_class)(**SHAPE, **changes))
    model.to(torch.bfloat16).save_pretrained(path)


def engine_of(path: Path, cpu_isa: str, threads: int) -> Engine:
    config = WorkerConfig.of(str(path), threads=threads, prefix_cache=False, cpu_isa=cpu_isa, max_context_tokens=4096)
    return Engine(load_runner(config, lambda _: None), config.device_scheduler, prefix_cache=False)


def measure(engines: list[Engine], name: str, repeat: int) -> list[float]:
    """Milliseconds of each, the median of `repeat` rounds."""
    load = LOADS[name]
    times: list[list[float]] = [[] for _ in engines]
    for i in range(-1, repeat):  # the first round warms both up
        batch = prompts(load, SHAPE["vocab_size"], seed=i + 1)
        for side, engine in zip(times, engines, strict=True):
            seconds = ours(engine, batch, load.num_new, temperature=0.0)[0 if load.is_prefill else 1]
            if i >= 0:
                side.append(1e3 * seconds)
    return [statistics.median(side) for side in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="NAME", help=", ".join(FAMILIES))
    parser.add_argument("--workload", action="append", choices=LOADED)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    print(f"{'':10}{'workload':<12}{'compiled ms':>12}{'torch ms':>10}{'ratio':>7}")
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Path(folder), family)
            engines = [engine_of(Path(folder), isa, args.threads) for isa in ("auto", "none")]
        for name in args.workload or LOADED:
            compiled, by_torch = measure(engines, name, args.repeat)
            print(f"{family:10}{name:<12}{compiled:12.2f}{by_torch:10.2f}{by_torch / compiled:7.2f}", flush=True)


if __name__ == "__main__":
    main()
