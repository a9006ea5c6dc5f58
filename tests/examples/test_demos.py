"""The demos run as their texts say, and their answers are equal."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def demo(name: str, *args: str) -> str:
    command = [sys.executable, "-m", f"diptych.examples.{name}", *args]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_answer_is_the_same_with_and_without_a_kv_cache(tmp_path: Path) -> None:
    text = demo("kv_cache", "--tokens", "24", "--plot", str(tmp_path / "times.svg"))
    assert "the same 24 tokens" in text
    assert len(re.findall(r"^ +\d+ +[\d.]+ +[\d.]+ +[\d.]+$", text, re.MULTILINE)) == 4
    assert (tmp_path / "times.svg").stat().st_size > 1000


def test_speculation_takes_fewer_steps_where_it_knows_the_answer(tmp_path: Path) -> None:
    text = demo("speculation", "--plot", str(tmp_path / "methods.svg"))
    rows = dict(re.findall(r"^(\w+(?: \w+)?) +\d+ +([\d.]+) +\d+%$", text, re.MULTILINE))
    assert list(rows) == ["none", "ngram", "suffix", "suffix again", "prediction", "draft", "self"]
    assert float(rows["none"]) == 1.0
    for method in ("suffix again", "prediction", "draft"):
        assert float(rows[method]) > 3
    assert float(rows["self"]) > 1
    assert "\033[32m" in text
    assert (tmp_path / "methods.svg").stat().st_size > 1000
