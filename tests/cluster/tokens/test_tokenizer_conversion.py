"""A checkpoint without a tokenizer.json is tokenised as transformers does, and converted once."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from diptych.cluster.tokens.tokenizer import Tokenizer
from diptych.cluster.tokens.tokenizer_conversion import needs_conversion, tokenizer_folder
from diptych.cluster.tokens.tokenizer_files import find_sources
from diptych.workers.common.errors import CheckpointError

from ...support.tokenizer_sources import SOURCES, llama_bpe, qwen2, tiktoken_alone, write_config, write_tiktoken

ODD = [
    "",
    " ",
    "Hello, the thing is loading.",
    "  two leading, three   within, trailing  ",
    "lines\n\n\n\ttabs\r\nand more\n",
    "é ünïcödé 日本語 \u200d 👩\u200d👩\u200d👧 \U0001f642",
    "1234567890 3.14159 don't we'll I'D",
    "<s></s><|endoftext|><start_of_turn><|begin|><0x0A>▁",
    "\x00\x7f\ufffd\u2028",
    "a" * 300,
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "tokenizers"


@pytest.mark.parametrize("make", SOURCES)
def test_a_checkpoint_without_tokenizer_json_is_tokenised_as_by_transformers(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    folder = tmp_path / "checkpoint"
    make(folder)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in ODD:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special=special) == tuple(expected), (text, special)
        ids = theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert "tokenizer.json" not in {p.name for p in folder.iterdir()}, "the checkpoint stays as it is"


def test_a_conversion_is_kept_by_the_content_of_its_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again, other = tmp_path / "checkpoint", tmp_path / "copy" / "checkpoint", tmp_path / "other" / "checkpoint"
    tiktoken_alone(first)
    shutil.copytree(first, again)
    assert needs_conversion(first)
    with tokenizer_folder(first) as kept:
        assert kept.parent == cache
        assert kept.name.startswith("checkpoint-")
    monkeypatch.setattr("sys.executable", "/absent")  # a second conversion would fail
    assert not needs_conversion(again)
    with tokenizer_folder(again) as found:
        assert found == kept
    tiktoken_alone(other)
    write_config(other, "qwen2")  # which class it is matters, too
    assert needs_conversion(other)
    assert {p.name for p in cache.iterdir()} == {kept.name, f"{kept.name}.lock"}, "nothing is left of the work"
    assert cache.stat().st_mode & 0o777 == 0o700


def test_without_diptych_home_the_cache_is_xdgs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken_alone(tmp_path / "checkpoint")
    monkeypatch.delenv("DIPTYCH_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with tokenizer_folder(tmp_path / "checkpoint") as kept:
        assert kept.parent == tmp_path / "xdg" / "diptych" / "tokenizers"


def test_where_nothing_can_be_kept_it_is_converted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiktoken_alone(tmp_path / "checkpoint")
    (tmp_path / "file").touch()
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "file"))
    assert Tokenizer.load(tmp_path / "checkpoint").encode("the") == (ord("t"), 257)
    assert "Set DIPTYCH_HOME" in caplog.text


def test_the_chat_template_is_the_checkpoints_own(tmp_path: Path) -> None:
    qwen2(tmp_path / "checkpoint")
    tokenizer = Tokenizer.load(tmp_path / "checkpoint")
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|endoftext|>hi"


def test_a_tiktoken_file_goes_by_any_name(tmp_path: Path) -> None:
    write_config(tmp_path / "checkpoint", "llama")
    write_tiktoken(tmp_path / "checkpoint", "cl100k.tiktoken")
    assert Tokenizer.load(tmp_path / "checkpoint").encode(" the") == (258,)


def test_a_file_that_cannot_be_converted_is_named_with_a_remedy(tmp_path: Path, cache: Path) -> None:
    write_config(tmp_path / "checkpoint", "llama")
    (tmp_path / "checkpoint" / "tokenizer.model").write_bytes(b"\x00 no model")
    with pytest.raises(CheckpointError, match=r"tokenizer.model cannot be converted to tokenizer.json \(.+\): convert"):
        Tokenizer.load(tmp_path / "checkpoint")
    assert [p.suffix for p in cache.iterdir()] == [".lock"], "nothing is left of the work"


def test_code_of_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    auto = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    write_config(folder, "llama", tokenizer_class="OwnTokenizer", auto_map=auto)
    write_tiktoken(folder, "own.tiktoken")
    (folder / "tokenization_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnTokenizer: pass\n")
    with pytest.raises(CheckpointError, match="cannot be converted"):
        Tokenizer.load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_conversion_that_takes_too_long_ends(tmp_path: Path) -> None:
    llama_bpe(tmp_path / "checkpoint")
    with (
        pytest.raises(CheckpointError, match=r"was not converted to tokenizer.json in 0.01 s"),
        tokenizer_folder(tmp_path / "checkpoint", limit_s=0.01),
    ):
        pass


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["tokenizer.json", "tokenizer.model"], []),
        (["tokenizer.model", "vocab.json", "merges.txt"], ["tokenizer.model"]),
        (["vocab.json", "merges.txt", "a.tiktoken"], ["vocab.json", "merges.txt"]),
        (["a.tiktoken"], ["a.tiktoken"]),
    ],
)
def test_the_files_that_say_most_are_taken(tmp_path: Path, names: list[str], found: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert [p.name for p in find_sources(tmp_path)] == found


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], r"holds no tokenizer: neither tokenizer.json nor .* Fetch the tokenizer's files"),
        (["vocab.json"], r"vocab.json and merges.txt go together, merges.txt is missing"),
        (["a.tiktoken", "b.tiktoken"], r"several tiktoken files \(a.tiktoken, b.tiktoken\)"),
    ],
)
def test_a_folder_without_a_tokenizer_says_what_is_missing(tmp_path: Path, names: list[str], expected: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=expected):
        find_sources(tmp_path)


def test_the_process_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """Its standard input is the sign: a FIFO in the place of a file that it would read keeps it from ending before."""
    import subprocess
    import sys

    os.mkfifo(tmp_path / "config.json")
    command = [sys.executable, "-m", "diptych.cluster.tokens.convert_tokenizer", str(tmp_path), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(120) == 1
