"""The benchmark of accuracy: what it says of the shipped model is what is true of it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_plain_model_agrees_with_itself_and_few_bits_less(tmp_path: Path) -> None:
    names = ["plain", "int4 at load", "w8a8 rtn"]
    command = [sys.executable, "-m", "benchmarks.engine.accuracy", *names, "--sequences", "12", "--threads", "1"]
    out = tmp_path / "rows.json"
    subprocess.run([*command, "--json", str(out)], cwd=ROOT, check=True, timeout=300, capture_output=True)
    plain, int4, w8a8 = json.loads(out.read_text())
    assert [row["name"] for row in (plain, int4, w8a8)] == names
    assert plain["agreement"] == 1
    assert 0.9 < int4["agreement"] < w8a8["agreement"] < 1
    assert 1 < plain["perplexity"] < 1.5
    assert abs(w8a8["perplexity"] - plain["perplexity"]) < abs(int4["perplexity"] - plain["perplexity"]) < 0.05
    assert w8a8["megabytes"] < 0.65 * plain["megabytes"]
