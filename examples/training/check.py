"""Answers of a saved model: sample questions by greedy decoding, and questions that were kept out of training.

python -m diptych.examples.training.check examples/tiny
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from .facts import Fact, load_facts, load_words

SAMPLE_QUESTIONS = (
    "What is Diptych?",
    "What is prefill?",
    "What is decode?",
    "What is the KV cache?",
    "Why are prefill and decode separated?",
    "What is a hand-off?",
    "How do I start Diptych?",
    "Tell me a story about a fox.",
    "Repeat: the hinge moves the blocks",
)
SAMPLE_PROMPTS = ("Once upon a time", "Question: What is chunked prefill?\nAnswer:", "The router")
MAX_NEW_TOKENS = 220
BATCH_SIZE = 32


class Answerer:
    """A saved checkpoint, decoded greedily."""

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        self.tokenizer = tokenizer
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._generate: Callable[..., torch.Tensor] = cast("Any", model).generate
        self._eos_ids = cast("list[int]", cast("Any", model.generation_config).eos_token_id)

    def chat(self, questions: list[str]) -> list[str]:
        """The answer to each question, as the only message of a chat; '[cut]' marks one that does not end by itself."""
        messages = [[{"role": "user", "content": question}] for question in questions]
        prompts = [self.tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
        return self.complete([str(prompt) for prompt in prompts], add_special_tokens=False)

    def complete(self, prompts: list[str], *, add_special_tokens: bool = True) -> list[str]:
        """Return the model's continuation of each prompt."""
        answers: list[str] = []
        for at in range(0, len(prompts), BATCH_SIZE):
            inputs = self.tokenizer(
                prompts[at : at + BATCH_SIZE],
                add_special_tokens=add_special_tokens,
                padding=True,
                padding_side="left",
                return_tensors="pt",
                return_token_type_ids=False,
            )
            output = self._generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
            new_ids = output[:, inputs["input_ids"].shape[1] :]
            answers += [self._text(row) for row in new_ids.tolist()]
        return answers

    def _text(self, ids: list[int]) -> str:
        ended = any(token_id in self._eos_ids for token_id in ids)
        text = cast("str", self.tokenizer.decode(ids, skip_special_tokens=True))
        return text.strip() + ("" if ended else " [cut]")


def check_model(folder: Path, facts: tuple[Fact, ...]) -> None:
    """Print the samples, and how many questions, known and held out, get exactly the answer of their fact."""
    answerer = Answerer(folder)
    for question, answer in zip(SAMPLE_QUESTIONS, answerer.chat(list(SAMPLE_QUESTIONS)), strict=True):
        print(f"\n> {question}\n{answer}")
    for prompt, answer in zip(SAMPLE_PROMPTS, answerer.complete(list(SAMPLE_PROMPTS)), strict=True):
        print(f"\n| {prompt} ... {answer}")
    print()
    known = [(fact.questions[0], fact.answer) for fact in facts]
    held_out = [(question, fact.answer) for fact in facts for question in fact.held_out]
    for title, pairs in (("first phrasings", known), ("held-out phrasings", held_out)):
        answers = answerer.chat([question for question, _ in pairs])
        misses = [(q, a) for (q, right), a in zip(pairs, answers, strict=True) if a != right]
        print(f"{folder.name}: {len(pairs) - len(misses)} of {len(pairs)} {title} get exactly the right answer")
        for question, answer in misses[:12]:
            print(f"  ? {question}\n    {answer}")


if __name__ == "__main__":
    check_model(Path(sys.argv[1]), load_facts(load_words()))
