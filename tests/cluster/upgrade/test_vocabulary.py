"""Vocabularies of checkpoints before an upgrade, by folders and by GGUF files."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from diptych.cluster.upgrade.vocabulary import check_tokenizers
from diptych.workers.common.errors import ConfigError

from ...support.gguf_vocabulary import write_bpe


def bpe(*first: str) -> tokenizers.Tokenizer:
    """Tokens of one byte each: `first`, then all others; and one of two."""
    names = [*first, *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(first)), "ab"]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def folder(path: Path, backend: tokenizers.Tokenizer) -> Path:
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    return path


def test_another_vocabulary_of_the_same_size_is_refused(tmp_path: Path) -> None:
    first, same = folder(tmp_path / "first", bpe("a", "b")), folder(tmp_path / "same", bpe("a", "b"))
    (same / "tokenizer.json").write_text((same / "tokenizer.json").read_text() + " ")
    check_tokenizers(first, same)
    with pytest.raises(ConfigError, match=r"in 2 tokens \(the first is 'a': 1, there 0\): workers of another"):
        check_tokenizers(first, folder(tmp_path / "other", bpe("b", "a")))


def test_vocabularies_in_gguf_files_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "home"))
    first = write_bpe(tmp_path / "first.gguf", bpe("a", "b"), "gpt-2")
    check_tokenizers(first, write_bpe(tmp_path / "same.gguf", bpe("a", "b"), "gpt-2"))
    with pytest.raises(ConfigError, match="in 2 tokens"):
        check_tokenizers(first, write_bpe(tmp_path / "other.gguf", bpe("b", "a"), "gpt-2"))
    check_tokenizers(folder(tmp_path / "folder", bpe("a", "b")), first)


def test_what_is_not_here_cannot_be_compared(tmp_path: Path) -> None:
    first, gone = folder(tmp_path / "first", bpe()), tmp_path / "gone"
    for before, after in ((first, gone), (gone, first), (gone, tmp_path / "gone.gguf")):
        with pytest.raises(ConfigError, match="are here to compare: run this on a machine where both are"):
            check_tokenizers(before, after)
    check_tokenizers(gone, gone)  # other settings, or newer code
