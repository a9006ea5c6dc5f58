"""`diptych quantize`, as it is called."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from diptych.cluster.cli import quantize as command
from diptych.cluster.cli.main import app
from diptych.workers.common.exit_codes import FAULT, GIVEN
from diptych.workers.models.plan.quantize_job import QuantizeJob


def call(*args: object) -> Result:
    return CliRunner().invoke(app, [str(of) for of in args])


def test_a_model_is_quantised(tmp_path: Path) -> None:
    result = call("quantize", "tiny", "--format", "w8a8", "--out", tmp_path / "out", "--ignore", "re:.*down_proj")
    assert result.exit_code == 0, result.output
    assert "30 weights in w8a8 by rtn, 6.3 -> 4.3 MiB, relative error 0.7" in result.stdout
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert "model.layers.4.mlp.up_proj.weight_scale" in names
    assert "model.layers.4.mlp.down_proj.weight_scale" not in names
    again = call("quantize", tmp_path / "out", "--format", "int8", "--out", tmp_path / "more")
    assert again.exit_code == GIVEN
    assert "is quantised already" in again.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("nowhere", "--format", "int8"), "nowhere does not exist"),
        (("tiny", "--format", "int3"), "--format must be one of int8, int4"),
        (("tiny", "--format", "int4", "--method", "awq"), "--method awq needs --calibrate"),
        (("tiny", "--format", "int4", "--memory-gib", "0.01"), "takes at least 0.5"),
    ],
)
def test_what_is_wrong_is_said(args: tuple[str, ...], named: str, tmp_path: Path) -> None:
    result = call("quantize", *args, "--out", tmp_path / "out")
    assert result.exit_code == GIVEN
    assert named in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_process_that_dies_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MODULE", "diptych.workers.no_such_module")
    result = call("quantize", "tiny", "--format", "int8", "--out", tmp_path / "out")
    assert result.exit_code == FAULT
    assert "the process that quantises ended with exit code 1" in result.stderr


@pytest.mark.parametrize("by", ["signal", pytest.param("parent", marks=pytest.mark.long)])
def test_nothing_is_left_when_it_is_stopped(by: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What is a hand-off? " * 20_000)
    (tmp_path / "made").mkdir()
    model = str(Path(command.__file__).parents[2] / "examples" / "tiny")
    job = QuantizeJob(model, str(tmp_path / "made" / "out"), "int4", str(text), samples=128, sequence_tokens=1024)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", command.MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job.to_json()) + "\n")
        process.stdin.flush()
        while "layer 1" not in (line := process.stdout.readline()):
            assert line
        assert len(list((tmp_path / "made").iterdir())) == 1  # the temporary folder
        if by == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            process.stdin.close()
        process.wait(60)
    assert not list((tmp_path / "made").iterdir())
