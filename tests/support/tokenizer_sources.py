"""Tokenizers small enough to make on the spot, as checkpoints hold them that have no tokenizer.json."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path

import sentencepiece
from tokenizers import ByteLevelBPETokenizer

TEXT = [line for line in (Path(__file__).parents[2] / "README.md").read_text().splitlines() if line.strip()]
# Each is a byte, or two that come before it.
PIECES = [bytes([b]) for b in range(256)] + [b" t", b"he", b" the", b"in", b"ing", b"er", b"\xc3\xa9", b"  ", b"12"]


def write_config(folder: Path, model_type: str, **settings: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 500}))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_sentencepiece(folder: Path, kind: str, **options: object) -> None:
    """`kind`: bpe or unigram."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=model,
        vocab_size=480,
        model_type=kind,
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())


def write_bpe(folder: Path) -> None:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXT, vocab_size=480, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save_model(str(folder))


def write_tiktoken(folder: Path, name: str) -> None:
    lines = (base64.b64encode(piece) + f" {rank}\n".encode() for rank, piece in enumerate(PIECES))
    (folder / name).write_bytes(b"".join(lines))


def llama_bpe(folder: Path) -> None:
    write_config(folder, "llama")
    write_sentencepiece(folder, "bpe")


def mistral_unigram(folder: Path) -> None:
    write_config(folder, "mistral", tokenizer_class="LlamaTokenizer", add_bos_token=True, bos_token="<s>")
    write_sentencepiece(folder, "unigram")


def gemma(folder: Path) -> None:
    write_config(folder, "gemma2")
    write_sentencepiece(
        folder,
        "bpe",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        bos_piece="<bos>",
        eos_piece="<eos>",
        pad_piece="<pad>",
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
    )


def qwen2(folder: Path) -> None:
    write_config(folder, "qwen2", eos_token="<|endoftext|>", chat_template="{{ eos_token }}{{ messages[0].content }}")
    write_bpe(folder)


def gpt2_class(folder: Path) -> None:
    write_config(folder, "llama", tokenizer_class="GPT2Tokenizer")
    write_bpe(folder)


def tiktoken_as_model(folder: Path) -> None:
    special = {str(len(PIECES)): {"content": "<|begin|>", "special": True}}
    write_config(folder, "llama", added_tokens_decoder=special, bos_token="<|begin|>")
    write_tiktoken(folder, "tokenizer.model")


def tiktoken_alone(folder: Path) -> None:
    write_config(folder, "llama")
    write_tiktoken(folder, "tiktoken.model")


SOURCES: list[Callable[[Path], None]] = [
    llama_bpe,
    mistral_unigram,
    gemma,
    qwen2,
    gpt2_class,
    tiktoken_as_model,
    tiktoken_alone,
]
