"""Vocabularies of GGUF files tokenise as the tokenizers that they were made of."""

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from diptych.cluster.preflight.checks import resolve_model
from diptych.cluster.tokens.gguf_tokenizer import PRE_TOKENIZERS, make_tokenizer
from diptych.cluster.tokens.tokenizer import Tokenizer
from diptych.cluster.tokens.tokenizer_conversion import needs_conversion
from diptych.workers.common.errors import CheckpointError
from diptych.workers.models.gguf.gguf_files import read_gguf
from diptych.workers.models.gguf.gguf_tokens import read_vocabulary

from ...support.gguf_vocabulary import write_bpe, write_sentencepiece
from ...support.tokenizer_sources import gemma, llama_bpe, qwen2
from .test_tokenizer_conversion import ODD

TEXTS = [
    *ODD,
    "HelloWorld's IT'LL CamelCase ÉcoleÀ 12345 don't/path//to\n",
    "\u01c5\u02b0\u0301 ǅAb zz\u0301Z 三四 ٣٤٥ a\u00a0b\t\tc",
    "<|user|>\nWhat?<|end|><|assistant|>",
]
TINY = Path(resolve_model("tiny"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "tokenizers"


def vocabulary(path: Path) -> dict[str, Any]:
    model = read_gguf(path)
    assert model is not None
    return read_vocabulary(model).to_json()


def test_the_shipped_model(tmp_path: Path) -> None:
    """All that is asked of a tokenizer, through the conversion process, as of the folder that it comes from."""
    template = (TINY / "chat_template.jinja").read_text()
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    special = {"bos": "<|bos|>", "eos": "<|end|>", "pad": "<|pad|>"}
    path = write_bpe(tmp_path / "tiny.gguf", backend, "gpt-2", **special, add_bos=True, chat_template=template)
    assert needs_conversion(path)
    ours, theirs = Tokenizer.load(path), Tokenizer.load(TINY)
    assert not needs_conversion(path)
    assert ours.vocab_size == theirs.vocab_size
    for text in TEXTS:
        for with_special in (True, False):
            assert ours.encode(text, special=with_special) == theirs.encode(text, special=with_special), text
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text)), text
    messages = [{"role": "user", "content": "What is Diptych?"}]
    assert ours.render_chat(messages) == theirs.render_chat(messages)
    assert ours.special_id("<|end|>") == theirs.special_id("<|end|>") == 3


def test_byte_level_bpe_that_cuts_as_qwen2(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    qwen2(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    path = write_bpe(tmp_path / "q.gguf", theirs.backend_tokenizer, "qwen2", arch="qwen2", eos="<|endoftext|>")
    older = write_bpe(tmp_path / "o.gguf", theirs.backend_tokenizer, None, arch="qwen2", eos="<|endoftext|>")
    for each in (path, older):
        ours = make_tokenizer(vocabulary(each))
        for text in TEXTS:
            assert ours.encode(text).ids == theirs.encode(text), text
            assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_texts_are_cut_as_transformers_cuts_those_of_the_name(pre: str, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    ours = make_tokenizer(vocabulary(write_bpe(tmp_path / "p.gguf", backend, pre)))
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
    theirs = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    for text in TEXTS:
        assert ours.pre_tokenizer is not None
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_digits_are_cut_first(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    ours = make_tokenizer(vocabulary(write_bpe(tmp_path / "p.gguf", backend, "smollm")))
    assert ours.pre_tokenizer is not None
    pieces = [text for text, _ in ours.pre_tokenizer.pre_tokenize_str("in 2024, it's")]
    assert pieces == ["in", "Ġ", "2", "0", "2", "4", ",", "Ġit", "'s"]


def test_sentencepiece_by_scores(tmp_path: Path) -> None:
    """As transformers tokenises with spaces as Llama's own tokenizer.json has them: one before every text, and after
    every token of a conversation; and plain texts as sentencepiece itself. Bos is before all."""
    folder = tmp_path / "checkpoint"
    llama_bpe(folder)
    path = write_sentencepiece(tmp_path / "s.gguf", folder / "tokenizer.model", bos="<s>", eos="</s>")
    ours, theirs = make_tokenizer(vocabulary(path)), AutoTokenizer.from_pretrained(folder).backend_tokenizer
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    theirs.pre_tokenizer = None
    for text in TEXTS:
        assert ours.encode(text).ids == [1, *theirs.encode(text, add_special_tokens=False).ids], text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(ours.encode(text).ids), text
    peer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in ("Hello, the thing is loading.", "1234567890 3.14159 don't we'll I'D"):
        assert ours.encode(text).ids == [1, *peer.encode(text)], text


def test_sentencepiece_without_a_space_before(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    gemma(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    settings = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "space_prefix": False}
    turns = ("<start_of_turn>", "<end_of_turn>")
    path = write_sentencepiece(tmp_path / "g.gguf", folder / "tokenizer.model", user=turns, arch="gemma2", **settings)
    ours = make_tokenizer(vocabulary(path))
    for text in TEXTS:
        assert ours.encode(text).ids == [2, *theirs.encode(text, add_special_tokens=False)], text


def test_what_cannot_be_converted_is_named_with_a_remedy(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    path = write_bpe(tmp_path / "p.gguf", backend, "kimi-k2")
    with pytest.raises(CheckpointError, match=r"pre is 'kimi-k2', which is not among .*put the model's own tokenizer"):
        Tokenizer.load(path)


def test_a_tokenizer_beside_a_file_is_taken_instead(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    write_bpe(tmp_path / "model" / "p.gguf", backend, "kimi-k2")
    (tmp_path / "model" / "tokenizer.json").write_text(backend.to_str())
    assert Tokenizer.load(tmp_path / "model").encode("a b") == tuple(backend.encode("a b").ids)
