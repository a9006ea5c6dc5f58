"""llama.cpp's decode step and prompt, by token ids. Run by versus_llamacpp.py with the Python of an environment
that holds llama-cpp-python and gguf, so it knows nothing of Diptych and needs no torch.

    python llamacpp_steps.py CHECKPOINT TYPE THREADS REPEAT NUM_PROMPT NUM_NEW

prints {"first_ms": ..., "step_ms": ...}: the median time of the prompt, and of a step after it. The checkpoint (Llama,
bfloat16, safetensors) is written as GGUF of TYPE, bfloat16 or one of TYPES, once, beside its own files, without a
tokenizer.
"""

import json
import mmap
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
MAX_CONTEXT = 4096
TYPES = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}  # besides bfloat16


def read_safetensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, bits of bfloat16 as uint16). The format: length of a JSON header, the header, the tensors' bytes."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length = int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(data[8 : 8 + length])
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                sys.exit(f"{path}: {name} is {entry['dtype']}: give a checkpoint in bfloat16")
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, np.frombuffer(data[begin:end], dtype=np.uint16).reshape(entry["shape"])


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def paired(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head in the order of llama.cpp's rope, which turns neighbours where Hugging Face turns halves."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write_gguf(checkpoint: Path, path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama":
        sys.exit(f"{checkpoint} is a {config['model_type']}: this writes GGUF for llama alone")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for shard in sorted(checkpoint.glob("*.safetensors")):
        for name, bits in read_safetensors(shard):
            if bits.ndim == 1:  # llama.cpp keeps norms in float32
                writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
                continue
            count = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else 0
            weight = paired(bits, count) if count else bits
            writer.add_tensor(gguf_name(name), weight.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_of(checkpoint: Path, of_type: str) -> Path:
    """Return the GGUF file of that type beside the checkpoint's files; it is written once."""
    path = checkpoint / f"{of_type}.gguf"
    if path.exists():
        return path
    unfinished = path.with_suffix(".unfinished")
    if of_type == "bfloat16":
        write_gguf(checkpoint, unfinished)
    else:
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = TYPES[of_type]
        source = gguf_of(checkpoint, "bfloat16")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(unfinished).encode(), settings):
            sys.exit(f"llama.cpp does not make {of_type} of {source}: see its message above")
    unfinished.rename(path)
    return path


class Model:
    def __init__(self, path: Path, threads: int) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            sys.exit(f"llama.cpp does not load {path}: delete it, or see its message above")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = MAX_CONTEXT, 2048, 512
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._sampler = llama_cpp.llama_sampler_init_greedy()

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def step(self, token_ids: Sequence[int]) -> int:
        """Computes them after what came before; the next token, greedily."""
        tokens = (llama_cpp.llama_token * len(token_ids))(*token_ids)
        if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(token_ids))):
            sys.exit("llama.cpp failed in a step")
        return llama_cpp.llama_sampler_sample(self._sampler, self._context, -1)


def measure(model: Model, num_prompt: int, num_new: int, seed: int) -> tuple[float, float]:
    """Seconds of the prompt, median seconds of a step."""
    model.clear()
    prompt = np.random.default_rng(seed).integers(3, model.vocab_size, num_prompt).tolist()
    began = time.perf_counter()
    token = model.step(prompt)
    first_s = time.perf_counter() - began
    steps: list[float] = []
    for _ in range(num_new - 1):
        began = time.perf_counter()
        token = model.step([token])
        steps.append(time.perf_counter() - began)
    return first_s, statistics.median(steps) if steps else first_s


def main() -> None:
    checkpoint, of_type = Path(sys.argv[1]), sys.argv[2]
    threads, repeat, num_prompt, num_new = map(int, sys.argv[3:])
    model = Model(gguf_of(checkpoint, of_type), threads)
    times = [measure(model, num_prompt, num_new, seed) for seed in range(repeat + 1)][1:]  # the first warms up
    firsts, steps = zip(*times, strict=True)
    print(json.dumps({"first_ms": 1e3 * statistics.median(firsts), "step_ms": 1e3 * statistics.median(steps)}))


if __name__ == "__main__":
    main()
