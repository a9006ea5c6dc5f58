"""The model that ships with the project: its files, its tokenizer, and that it answers."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from diptych.examples.training.check import Answerer
from diptych.examples.training.documents import Documents
from diptych.examples.training.facts import load_facts, load_words

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY, DRAFT = EXAMPLES / "tiny", EXAMPLES / "tiny_draft"
MAX_BYTES = 8_000_000
TEXTS = (
    "What is the KV cache?",
    "Ünïcödé: naïve café, größer, Ελληνικά, 日本語, العربية",
    "emoji 🦊🚀👩‍👩‍👧‍👦 and a flag 🇳🇴",
    "def f(x):\n\treturn {'a': x[0] ** 2}  # two  spaces\r\n",
    "  leading, trailing and \u00a0 odd spaces \n\n",
)


@pytest.fixture(scope="module")
def tiny() -> Answerer:
    return Answerer(TINY)


@pytest.mark.parametrize("folder", [TINY, DRAFT], ids=lambda folder: folder.name)
def test_checkpoint_is_small_bfloat16_with_grouped_queries(folder: Path) -> None:
    assert (folder / "model.safetensors").stat().st_size <= MAX_BYTES
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["head_dim"] % 16 == 0
    assert config["vocab_size"] % 64 == 0
    assert config["max_position_embeddings"] == 2048


def test_draft_shares_the_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (TINY / name).read_bytes() == (DRAFT / name).read_bytes()


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_gives_any_text_back(tiny: Answerer, text: str) -> None:
    ids = tiny.tokenizer.encode(text, add_special_tokens=False)
    assert max(ids) < 2048
    assert tiny.tokenizer.decode(ids) == text


def test_chat_template_marks_turns_and_starts_once(tiny: Answerer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    text = tiny.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>Bye<|end|><|assistant|>"
    )
    ids = tiny.tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tiny.tokenizer.bos_token_id) == 1
    assert ids.count(tiny.tokenizer.eos_token_id) == 4


def test_generation_ends_at_either_end_token(tiny: Answerer) -> None:
    eos_ids = json.loads((TINY / "generation_config.json").read_text())["eos_token_id"]
    assert tiny.tokenizer.convert_ids_to_tokens(eos_ids) == ["<|end|>", "<|endoftext|>"]


def test_answers_are_right_and_end_by_themselves(tiny: Answerer) -> None:
    expected = {
        "What is Diptych?": ("language models", "prefill", "decode"),
        "What is a hand-off?": ("KV cache", "source", "sink"),
        "How do I start Diptych?": ("make serve",),
    }
    for answer, words in zip(tiny.chat(list(expected)), expected.values(), strict=True):
        assert not answer.endswith("[cut]")
        assert all(word in answer for word in words), answer


def test_documents_are_the_same_for_the_same_seed() -> None:
    words = load_words()
    documents = Documents(load_facts(words), words)
    first, again, other = (list(islice(documents.stream(seed), 50)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_no_held_out_question_is_trained_on() -> None:
    facts = load_facts(load_words())
    assert len(facts) > 300
    trained = {question.lower() for fact in facts for question in fact.questions}
    assert not [question for fact in facts for question in fact.held_out if question.lower() in trained]
