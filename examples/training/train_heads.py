"""Makes the draft heads of examples/tiny, examples/tiny_eagle3 and examples/tiny_mtp, from the text in data/.

    python -m diptych.examples.training.train_heads [--only eagle3|mtp] [--output examples]

The target is frozen; a head learns its distribution of the tokens after next, over three draft steps (training-time
test, head_models.py). Everything is seeded. What was saved is then read again and asked how often its greedy drafts are
what the target says, in the target's own answers.
"""

import argparse
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

if not __package__:  # run by path rather than with -m (PEP 366)
    __package__ = "diptych.examples.training"

from .documents import Documents
from .facts import load_facts, load_words
from .head_models import HeadShape, TrainedEagle3, TrainedMtp
from .packing import Packer

EXAMPLES = Path(__file__).resolve().parent.parent
NUM_STEPS = 3  # draft steps
STEP_WEIGHT = 0.8  # of the loss of each draft step, relative to the one before (EAGLE's training code)
LAYER_IDS = (1, 3, 5)  # after how many of tiny's 5 layers an EAGLE-3 head is given the residual
DRAFT_VOCAB_SIZE = 1216  # nearly all that the text uses; the head stays below 2 MB
ROWS, ROW_TOKENS = 4, 256
NUM_QUESTIONS = 200  # whose answers are drafted in the end
Head = TrainedEagle3 | TrainedMtp


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    intermediate_size: int
    num_steps: int
    peak_lr: float = 2.5e-3
    warmup_steps: int = 40
    seed: int = 3


RECIPES = {"eagle3": Recipe("tiny_eagle3", 256, 560), "mtp": Recipe("tiny_mtp", 512, 500)}


class Target:
    """examples/tiny, frozen, and what heads are given of it."""

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        self.tokenizer, self.config = tokenizer, json.loads((folder / "config.json").read_text())
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        self.embed = self.model.model.embed_tokens.weight.data  # no parameter of a head
        self._after: dict[int, Tensor] = {}
        for i, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self._keep(i + 1))

    def hidden(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids: [B, T]. Returns the residuals after LAYER_IDS side by side, [B, T, 3 H], and the final normed hidden
        states, [B, T, H]."""
        with torch.no_grad():
            final = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        return torch.cat([self._after[i] for i in LAYER_IDS], dim=2), final

    def answers(self, questions: list[str]) -> Iterator[tuple[list[int], int]]:
        """Yield the token ids of a chat with each question's greedy answer, and how many are before the answer."""
        generate: Callable[..., Tensor] = cast("Any", self.model).generate
        ends, pad = set(self.config["eos_token_id"]), self.config["pad_token_id"]
        messages = [[{"role": "user", "content": question}] for question in questions]
        prompts = [
            str(self.tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True)) for m in messages
        ]
        for at in range(0, len(prompts), 32):
            inputs = self.tokenizer(
                prompts[at : at + 32], add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
            )
            mask = inputs["attention_mask"]
            rows = generate(input_ids=inputs["input_ids"], attention_mask=mask, do_sample=False, max_new_tokens=120)
            for row, num_padded in zip(rows.tolist(), (mask == 0).sum(1).tolist(), strict=True):
                num_prompt = mask.shape[1] - num_padded
                ids = row[num_padded:]
                while ids[-1] == pad or ids[-2] in ends:
                    ids.pop()
                yield ids, num_prompt

    def _keep(self, index: int) -> Callable[[object, object, object], None]:
        def keep(_layer: object, _given: object, out: object) -> None:
            self._after[index] = cast("Tensor", out[0] if isinstance(out, tuple) else out)

        return keep


def frequent_ids(packer: Packer) -> Tensor:
    """Ascending ids of the DRAFT_VOCAB_SIZE most frequent tokens that a model learns to say."""
    counts: Counter[int] = Counter()
    for _ in range(300):
        _, labels = packer.batch(ROWS, ROW_TOKENS, long=False)
        counts.update(labels[labels >= 0].tolist())
    found = [token_id for token_id, _ in counts.most_common(DRAFT_VOCAB_SIZE)]
    rest = (i for i in range(1 << 20) if i not in counts)
    found += [next(rest) for _ in range(DRAFT_VOCAB_SIZE - len(found))]
    return torch.tensor(sorted(found))


def shape_of(target: Target, recipe: Recipe) -> HeadShape:
    config = target.config
    return HeadShape(
        config["hidden_size"],
        recipe.intermediate_size,
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["rms_norm_eps"],
        config["rope_parameters"]["rope_theta"],
    )


def make_head(kind: str, target: Target, recipe: Recipe, vocabulary: Tensor) -> Head:
    """vocabulary: the target's ids of the draft vocabulary, [D] int64."""
    shape = shape_of(target, recipe)
    return TrainedEagle3(shape, target.embed[vocabulary]) if kind == "eagle3" else TrainedMtp(shape, target.embed)


def losses(head: Head, target: Target, vocabulary: Tensor, ids: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """Each draft step's cross entropy with the target's distribution over the draft vocabulary, where the target's
    likeliest token is in it (as SpecForge masks). ids, labels: [B, T + NUM_STEPS + 1]."""
    residuals, final = target.hidden(ids)
    num = ids.shape[1] - NUM_STEPS - 1
    is_drafted = torch.zeros(len(target.embed), dtype=torch.bool).index_fill(0, vocabulary, True)
    is_learned = labels[:, 1:] >= 0  # of the token after each
    logits = final[:, :-1][is_learned] @ target.embed.mT
    counted = torch.zeros_like(is_learned).masked_scatter(is_learned, is_drafted[logits.argmax(1)])
    wanted = torch.zeros(*counted.shape, len(vocabulary))
    wanted[is_learned] = logits[:, vocabulary].softmax(1)
    given = (residuals if isinstance(head, TrainedEagle3) else final)[:, :num]
    for step, hidden in enumerate(head.unrolled(given, target.embed[ids[:, 1:]], NUM_STEPS)):
        rows = slice(step + 1, step + 1 + num)  # of what the target says after token i + 1 + step
        counts = counted[:, rows]
        yield -(wanted[:, rows][counts] * log_softmax(head.logits(hidden[counts]), 1)).sum(1).mean()


def train(recipe: Recipe, head: Head, target: Target, vocabulary: Tensor, packer: Packer) -> None:
    matrices = [p for p in head.parameters() if p.dim() > 1]
    vectors = [p for p in head.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.02, fused=True)
    start, smooth = time.monotonic(), [0.0] * NUM_STEPS
    for step in range(recipe.num_steps):
        progress = step / recipe.num_steps
        warm = min((step + 1) / recipe.warmup_steps, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        ids, labels = packer.batch(ROWS, ROW_TOKENS + NUM_STEPS + 1, long=False)
        each = list(losses(head, target, vocabulary, ids, labels))
        total = sum((STEP_WEIGHT**i * loss for i, loss in enumerate(each)), torch.zeros(()))
        total.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        smooth = [old + (0.05 if step else 1.0) * (loss.item() - old) for old, loss in zip(smooth, each, strict=True)]
        if (step + 1) % 50 == 0:
            shown = " ".join(f"{loss:.3f}" for loss in smooth)
            print(
                f"{recipe.name} step {step + 1}/{recipe.num_steps} {shown} {time.monotonic() - start:.0f} s", flush=True
            )


def save(kind: str, recipe: Recipe, head: Head, target: Target, vocabulary: Tensor, folder: Path) -> None:
    """EAGLE-3: as SpecForge does. MTP: as DeepSeek-V3's checkpoint has it, with the target's config, alone."""
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in head.state_dict().items()}
    config = dict(target.config)
    if kind == "eagle3":
        t2d = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, vocabulary, True)
        tensors |= {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": t2d}
        aux = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in LAYER_IDS], "use_aux_hidden_state": True}
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "eagle_config": aux}
        config |= {"draft_vocab_size": len(vocabulary), "tie_word_embeddings": False}
    else:
        prefix = f"model.layers.{config['num_hidden_layers']}."
        tensors = {prefix + name: tensor for name, tensor in tensors.items()}
        config |= {"num_nextn_predict_layers": 1}
    config |= {"intermediate_size": recipe.intermediate_size}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    print(f"saved {folder}: {(folder / 'model.safetensors').stat().st_size:,} bytes", flush=True)


def load(kind: str, head: Head, folder: Path) -> None:
    """Give `head` the weights that were saved."""
    stored = load_file(folder / "model.safetensors")
    names = head.state_dict().keys()
    prefix = "" if kind == "eagle3" else next(iter(stored)).split("layers.")[0] + "layers.5."
    head.load_state_dict({name: stored[prefix + name].float() for name in names})


def agreement(head: Head, target: Target, vocabulary: Tensor, chats: list[tuple[list[int], int]]) -> list[float]:
    """Share of the places in answers at which the first 1, 2, ... NUM_STEPS greedy drafts are all what the target said.
    Drafts after a wrong one do not count, so each step may be given what the target said."""
    right, places = torch.zeros(NUM_STEPS), 0
    for ids, num_prompt in chats:
        row = torch.tensor([ids])
        residuals, final = target.hidden(row)
        num = len(ids) - NUM_STEPS - 1
        first = num_prompt - 2  # the entry whose draft is the second token of the answer: the first is the target's
        if num - first < 2:
            continue
        given = (residuals if isinstance(head, TrainedEagle3) else final)[:, :num]
        is_right = torch.ones(num - first - 1, dtype=torch.bool)
        with torch.no_grad():
            for step, hidden in enumerate(head.unrolled(given, target.embed[row[:, 1:]], NUM_STEPS)):
                drafted = vocabulary[head.logits(hidden[0, first + 1 :]).argmax(1)]
                is_right &= drafted == row[0, first + 3 + step : num + 2 + step]
                right[step] += is_right.sum()
        places += len(is_right)
    return (right / places).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(RECIPES), help="make just this one")
    parser.add_argument("--output", type=Path, default=EXAMPLES, help="folder that gets a folder for each head")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--steps", type=int, help="train shorter or longer than the recipe says")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    words = load_words()
    facts = load_facts(words)
    target = Target(EXAMPLES / "tiny")
    every = max(len(facts) // NUM_QUESTIONS, 1)
    for kind, recipe in RECIPES.items():
        if arguments.only not in (None, kind):
            continue
        start = time.monotonic()
        torch.manual_seed(recipe.seed)
        packer = Packer(Documents(facts, words), target.tokenizer, recipe.seed)
        vocabulary = frequent_ids(packer) if kind == "eagle3" else torch.arange(target.config["vocab_size"])
        head, folder = make_head(kind, target, recipe, vocabulary), arguments.output / recipe.name
        lengthened = replace(recipe, num_steps=arguments.steps or recipe.num_steps)
        train(lengthened, head, target, vocabulary, packer)
        save(kind, recipe, head, target, vocabulary, folder)
        load(kind, head, folder)
        chats = list(target.answers([fact.questions[0] for fact in facts[::every]]))
        shares = " ".join(f"{share:.3f}" for share in agreement(head, target, vocabulary, chats))
        print(f"{recipe.name}: the first 1, 2, 3 drafts are right at {shares} of {len(chats)} answers' places")
        print(f"{recipe.name} took {(time.monotonic() - start) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
