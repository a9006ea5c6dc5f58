"""`diptych simulate`, on the model that ships with Diptych."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cluster.cli.main import app
from diptych.workers.costs.step_cost import StepWork
from diptych.workers.costs.step_log_format import StepLogHeader
from diptych.workers.engine.step_log import StepLog

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
        (("--gpu", "H100", "--rate", "nan"), "--rate must be above 0"),
        (("--gpu", "H100", "--rate", "1e-320"), "--rate must be at least 1e-06"),
        (("--gpu", "H100", "--rate", "1", "--length-scale", "inf"), "--length-scale must be at most 1e+06"),
        (("--gpu", "H100", "--rate", "1", "--time-scale", "inf"), "--time-scale must be at most 1e+06"),
        (("--gpu", "H100", "--rate", "1", "--think-time", "inf"), "--think-time must be at most 1e+06"),
        (("--gpu", "H100", "--rate", "1", "--input-tokens", "lognormal:9"), "must be lognormal:MEDIAN:SIGMA"),
        (("--profile", str(tmp_path / "none.json"), "--rate", "1"), "none.json"),
    ):
        code, output = simulate(tmp_path, *flags)
        assert code == 2 and message in output, output


def test_a_profile_is_made_and_used(tmp_path: Path) -> None:
    log = StepLog(
        tmp_path / "steps", "a", StepLogHeader("m", "bfloat16", "cpu", "mixed", 1, 1, 16, 1000, 128.0, "here", 2)
    )
    for i in range(60):
        work = StepWork(i % 4 + 1, 100 * i) if i % 5 else StepWork().with_chunk(0, 50 + i)
        log.add(i * 1.0, work, 0.01 + 0.001 * work.num_decodes + 0.0005 * work.num_prefill)
    log.close()
    profile = str(tmp_path / "p.json")
    made = CliRunner().invoke(app, ["profile", str(tmp_path / "steps"), "--output", profile])
    assert made.exit_code == 0 and "60 steps of m, 1 threads, here" in made.output, made.output
    code, output = simulate(tmp_path, "--profile", profile, "--trace", str(tmp_path / "azure.csv"), "--json")
    assert code == 0, output
    ttft = json.loads(output)["spreads"]["ttft"]
    assert ttft["percentiles"]["50"] == pytest.approx(10 + 0.5 * 75, rel=1e-3), "prompts of 60 and 90 tokens"
    code, output = simulate(tmp_path, "--profile", profile, "--rate", "1", "--link-gbit", "0")
    assert code == 2 and "--link-gbit must be above 0" in output


def test_a_load_that_is_a_burst_is_noted(tmp_path: Path) -> None:
    """Two requests within 0.3 ms, each of which takes tens: their rate is none that a cluster keeps."""
    flags = ("--gpu", "H100", "--trace", str(tmp_path / "azure.csv"))
    code, output = simulate(tmp_path, *flags, "--time-scale", "0.001")
    assert code == 0 and "note: the requests came within 0.0003 s" in output, output
    code, output = simulate(tmp_path, *flags, "--time-scale", "100")
    assert code == 0 and "note: " not in output, output
    code, output = simulate(tmp_path, *flags, "--time-scale", "100", "--json")
    assert json.loads(output)["load_s"] == pytest.approx(30.0)
