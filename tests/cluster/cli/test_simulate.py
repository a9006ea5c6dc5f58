"""`diptych simulate`, on the model that ships with Diptych."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cluster.cli.main import app

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,60,20
2023-11-16 18:15:46.9805900,90,1
"""
POOLS = "pools:\n  prefill: {replicas: 1}\n  decode: {replicas: 1}\n"


def simulate(folder: Path, *flags: str) -> tuple[int, str]:
    (folder / "cluster.yaml").write_text(f"model: tiny\n{POOLS}")
    (folder / "azure.csv").write_text(AZURE)
    result = CliRunner().invoke(app, ["simulate", "--config", str(folder / "cluster.yaml"), *flags])
    return result.exit_code, result.output


def test_a_trace_on_gpus(tmp_path: Path) -> None:
    flags = ("--gpu", "H100", "--trace", str(tmp_path / "azure.csv"), "--price", "2")
    code, output = simulate(tmp_path, *flags, "--json")
    assert code == 0, output
    found = json.loads(output)
    assert (found["completed"], found["num_requests"], found["good"]) == (2, 2, 1.0)
    assert found["spreads"]["ttft"]["percentiles"]["50"] > 1.0, "a step has an overhead of 1 ms"
    assert set(found["pools"]) == {"prefill", "decode"}
    hours = sum(pool["gpu_hours"] for pool in found["pools"].values())
    assert found["cost_per_million_tokens"] * 21 / 1e6 == pytest.approx(2 * hours)
    code, output = simulate(tmp_path, *flags)
    assert code == 0 and "2 of 2 requests" in output and "ttft" in output


def test_synthetic_sessions(tmp_path: Path) -> None:
    lengths = ("--input-tokens", "20-40", "--output-tokens", "lognormal:5:0.1", "--turns", "3")
    code, output = simulate(tmp_path, "--gpu", "a100", "--rate", "5", "--num-requests", "4", *lengths, "--json")
    assert code == 0, output
    assert json.loads(output)["completed"] == 12


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for flags, message in (
        (("--rate", "1"), "give --profile FILE or --gpu NAME"),
        (("--gpu", "H100"), "give --trace FILE, or --rate"),
        (("--gpu", "K80", "--rate", "1"), "there is no GPU 'K80'"),
        (("--gpu", "H100", "--rate", "-1"), "--rate must be above 0"),
        (("--gpu", "H100", "--rate", "1", "--input-tokens", "lognormal:9"), "must be lognormal:MEDIAN:SIGMA"),
        (("--profile", str(tmp_path / "none.json"), "--rate", "1"), "none.json"),
    ):
        code, output = simulate(tmp_path, *flags)
        assert code == 2 and message in output, output
