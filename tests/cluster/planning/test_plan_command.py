"""`diptych plan --gpus`, from its flags to cluster.yaml."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cluster.cli.main import app
from diptych.cluster.common import config_file

from .shapes import LARGE, LLAMA, checkpoint

LEVEL = ("--ttft", "500", "--tpot", "50", "--jobs", "1")
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + i // 10}.{i % 10}000000,{60 + 7 * i},{4 + i % 9}\n" for i in range(40)
)


def plan(*flags: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    result = CliRunner().invoke(app, ["plan", *flags])
    return result.exit_code, result.stdout, result.stderr


def simulate(config: Path, *flags: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["simulate", "--config", str(config), "--gpu", "H100", *flags, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.slow
def test_a_trace_becomes_a_cluster(tmp_path: Path) -> None:
    trace, config = tmp_path / "azure.csv", tmp_path / "cluster.yaml"
    trace.write_text(AZURE)
    flags = ("--gpus", "H100:2", "--trace", str(trace), *LEVEL, "--price", "2.5", "--output", str(config))
    code, out, err = plan("tiny", *flags, "--plot", str(tmp_path / "goodput.svg"))
    assert code == 0, err
    assert out.startswith("40 requests of azure.csv, 196 prompt and 8 answer tokens on average, on H100:2\n")
    assert "2 mixed" in out and "1 prefill + 1 decode" in out and "$ / M tokens" in out
    assert "disaggregation" in out and "best: " in out
    assert "8 layouts, 40 requests" in err, "progress is shown where output is no terminal"
    assert "</svg>" in (tmp_path / "goodput.svg").read_text()
    served = config_file.load(config, {})
    assert served.pools.num_workers in {1, 2} and served.is_on_gpus
    assert simulate(config, "--trace", str(trace))["good"] == 1.0


@pytest.mark.slow
def test_the_fewest_gpus_for_a_rate(tmp_path: Path) -> None:
    """One GPU decodes 8 B parameters in about 8 ms a step: it serves two requests a second easily."""
    model = str(checkpoint(tmp_path, LLAMA))
    load = ("--input-tokens", "200", "--output-tokens", "20", "--num-requests", "60")
    code, out, err = plan(model, "--gpus", "H100:4", *load, *LEVEL, "--rate", "2")
    assert code == 0, err
    assert "at 2 requests/s" in out and "best: 1 mixed, TP 1" in out
    assert "no layout that hands off most of its requests meets the level on that many GPUs" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "verdict"),
    [
        (("4000", "100", "1000", "9"), "disaggregation loses: the best colocated layout (2 mixed, TP 1, "),
        (("2000", "50", "85", "8.5"), "no layout that hands off most of its requests meets the level"),
    ],
)
def test_the_best_of_each_family_is_told(tmp_path: Path, load: tuple[str, ...], verdict: str) -> None:
    """A model of 33 heads: a worker has one GPU. Workers that decode compute prompts while they wait for their weights:
    those of a decode pool, to which prompts do not come, wait in vain."""
    shape = LLAMA | {"hidden_size": 33 * 128, "num_attention_heads": 33, "num_key_value_heads": 11}
    model = str(checkpoint(tmp_path, shape))
    tokens = ("--input-tokens", load[0], "--output-tokens", load[1], "--num-requests", "80", "--jobs", "1")
    code, out, err = plan(model, "--gpus", "H100:2", *tokens, "--ttft", load[2], "--tpot", load[3])
    assert code == 0, err
    assert verdict in out and "best: 2 mixed, TP 1, " in out
    assert ("(1 prefill + 1 decode, TP 1, roles, which hands off 100%)" in out) == ("loses" in verdict)


@pytest.mark.slow
def test_processes_find_the_same() -> None:
    flags = ("--gpus", "A100", "--input-tokens", "100", "--output-tokens", "5", "--num-requests", "20", *LEVEL)
    (code, one, _), (_, two, err) = plan("tiny", *flags), plan("tiny", *flags, "--jobs", "2")
    assert code == 0, err
    assert one.splitlines()[:-1] == two.splitlines()[:-1], "all but the time that it took"
    assert "best: 1 mixed, TP 1" in one


def test_what_is_wrong_is_named_with_a_remedy(tmp_path: Path) -> None:
    model = str(checkpoint(tmp_path, LARGE))
    empty = tmp_path / "empty.csv"
    empty.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    synthetic = ("--num-requests", "20", *LEVEL)
    for flags, message in (
        (("--gpus", "H100", *synthetic), "1: the weights take 141"),
        (("--gpus", "K80:8", *synthetic), "there is no GPU 'K80'"),
        (("--gpus", "H100:4,L40S:4", *synthetic), "the simulator gives all pools one kind of GPU"),
        (("--gpus", "H100:x", *synthetic), "--gpus must be KIND:N"),
        (("--gpus", "H100:8", "--trace", str(empty), *LEVEL), "contains no request"),
        (("--gpus", "H100:8", "--ttft", "500"), "--gpus needs --tpot in milliseconds"),
        (("--gpus", "H100:8", *synthetic, "--input-tokens", "9000"), "20 of 20 requests are longer than the model's"),
        (("--gpus", "H100:8", *synthetic, "--kv-memory", "2GiB"), "--kv-memory does not work with --gpus"),
        (("--gpus", "H100:8", *synthetic, "--quantize", "int9"), "--quantize must be int8"),
        (("--gpus", "H100:8", *synthetic, "--tensor-parallel", "2"), "--tensor-parallel is searched with --gpus"),
        (("--gpus", "H100:2", *synthetic, "--tpot", "10"), "no layout meets TTFT <= 500 ms and TPOT <= 10 ms"),
        (("--gpus", "H100:2", *synthetic, "--plot", "a.pdf"), "--plot writes SVG, PNG, HTML files only"),
        (("--rate", "3"), "--rate needs --gpus"),
        (("--num-requests", "1000"), "--num-requests needs --gpus"),
    ):
        code, _, err = plan(model, *flags)
        assert code == 2 and message in err, err


def test_a_folder_whose_name_has_brackets_keeps_them(tmp_path: Path) -> None:
    """They mark up text for the terminal elsewhere."""
    folder = tmp_path / "llama[v2]"
    folder.mkdir()
    checkpoint(folder, LLAMA)
    code, out, err = plan(str(folder), "--rank-memory", "80GiB")
    assert code == 0, err
    assert out.startswith("llama[v2]: LlamaForCausalLM")
