"""Makes the two models that ship with Diptych, examples/tiny and examples/tiny_draft, from the text in data/.

    python -m diptych.examples.training.train [--only tiny|tiny_draft] [--output examples]

The tokenizer is trained first and shared; then each model is trained from random weights, saved in bfloat16, and
checked from what was saved. Everything is seeded.
"""

import argparse
import json
import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if not __package__:  # run by path rather than with -m (PEP 366)
    __package__ = "diptych.examples.training"

from .check import check_model
from .documents import Documents
from .facts import load_facts, load_words
from .packing import Packer
from .vocabulary import BOS, END_OF_TEXT, END_OF_TURN, MAX_POSITIONS, PAD, SPECIAL_TOKENS, VOCAB_SIZE
from .vocabulary import train_tokenizer as make_tokenizer

EXAMPLES = Path(__file__).resolve().parent.parent
BATCH_TOKENS = 4096
ROW_TOKENS, LONG_ROW_TOKENS, LONGEST_ROW_TOKENS = 256, 1024, 2048
LONG_EVERY, LONGEST_EVERY = 10, 50  # steps


@dataclass(frozen=True, slots=True)
class Recipe:
    """The shape of one model and how long it learns."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_steps: int
    peak_lr: float
    head_dim: int = 32
    warmup_steps: int = 60
    weight_decay: float = 0.05
    seed: int = 1


RECIPES = (
    Recipe("tiny", 256, 512, num_layers=5, num_heads=8, num_kv_heads=2, num_steps=1800, peak_lr=2.5e-3),
    Recipe("tiny_draft", 128, 256, num_layers=2, num_heads=4, num_kv_heads=2, num_steps=2400, peak_lr=5e-3),
)


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    bos, pad, *eos = (SPECIAL_TOKENS.index(token) for token in (BOS, PAD, END_OF_TURN, END_OF_TEXT))
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        use_cache=True,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    return model


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then half a cosine down to a fiftieth of the peak."""
    if step < recipe.warmup_steps:
        return recipe.peak_lr * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / (recipe.num_steps - recipe.warmup_steps)
    return recipe.peak_lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def row_tokens(step: int) -> int:
    """Most rows are short; some are long, so that no position is new to the model."""
    if step % LONGEST_EVERY == LONGEST_EVERY - 1:
        return LONGEST_ROW_TOKENS
    return LONG_ROW_TOKENS if step % LONG_EVERY == LONG_EVERY - 1 else ROW_TOKENS


def train(recipe: Recipe, documents: Documents, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The trained model, in float32."""
    torch.manual_seed(recipe.seed)
    model = build_model(recipe)
    packer = Packer(documents, tokenizer, recipe.seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=True)
    start, smooth_loss = time.monotonic(), math.log(VOCAB_SIZE)
    model.train()
    for step in range(recipe.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        num_tokens = row_tokens(step)
        ids, labels = packer.batch(BATCH_TOKENS // num_tokens, num_tokens, long=num_tokens > ROW_TOKENS)
        loss = next_token_loss(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        smooth_loss += 0.05 * (loss.item() - smooth_loss)
        if (step + 1) % 50 == 0:
            progress = f"step {step + 1}/{recipe.num_steps} loss {smooth_loss:.3f}"
            print(f"{recipe.name} {progress} {time.monotonic() - start:.0f} s", flush=True)
    return model.eval()


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next tokens that are labelled; ids and labels are int64[num_rows, num_tokens]."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    name_tokenizer_for_all(folder / "tokenizer_config.json")
    num_parameters = sum(p.numel() for p in model.parameters())
    num_bytes = (folder / "model.safetensors").stat().st_size
    print(f"saved {folder}: {num_parameters:,} parameters, {num_bytes:,} bytes", flush=True)


def name_tokenizer_for_all(path: Path) -> None:
    """transformers 5 writes names that 4 does not know; both know these."""
    settings = json.loads(path.read_text())
    settings.pop("backend", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "extra_special_tokens" in settings:
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[recipe.name for recipe in RECIPES], help="make just this one")
    parser.add_argument("--output", type=Path, default=EXAMPLES, help="folder that gets a folder for each model")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--steps", type=int, help="train shorter or longer than the recipe says")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    words = load_words()
    facts = load_facts(words)
    documents = Documents(facts, words)
    tokenizer = make_tokenizer(documents, seed=0)
    print(f"{len(facts)} facts, {sum(len(fact.questions) for fact in facts)} questions", flush=True)
    for recipe in RECIPES:
        if arguments.only in (None, recipe.name):
            start = time.monotonic()
            folder = arguments.output / recipe.name
            lengthened = replace(recipe, num_steps=arguments.steps or recipe.num_steps)
            save(train(lengthened, documents, tokenizer), tokenizer, folder)
            check_model(folder, facts)
            print(f"{recipe.name} took {(time.monotonic() - start) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
