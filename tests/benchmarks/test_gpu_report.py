"""benchmarks/gpu/gpu_report.py: the commands that it runs, how it continues after failures, and what it writes."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import gpu_report as script
from benchmarks.gpu.kernel_bench import commands, report

ROOT = Path(__file__).parents[2]


def python(name: str, code: str, **environment: str) -> object:
    return commands.Command(name, (sys.executable, "-c", code), environment)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_report.py"])
    assert script.main() == 1
    told = capsys.readouterr()
    assert not told.out and told.err == "This measures a GPU, and torch sees none here.\n"


def test_commands_fail_and_are_cut_off_by_themselves(tmp_path: Path) -> None:
    fine = python("fine", "import os; print(os.environ['WORD'], os.getcwd())", WORD="heard")
    broken = python("broken", "import sys; print('why'); sys.exit(3)")
    far = time.monotonic() + 60
    passed, failed = commands.run_all([fine, broken], far, tmp_path, 2)
    assert passed.has_passed and passed.output.split() == ["heard", str(tmp_path)] and "WORD=heard" in passed.command
    assert failed.status == "failed (exit status 3)" and failed.output == "why\n"
    endless = python("endless", "import time; print('begun', flush=True); time.sleep(600)")
    cut = commands.run(endless, time.monotonic() + 2, tmp_path)
    assert cut.status.startswith("cut off after") and cut.output in ("begun\n", "") and cut.seconds < 60
    late = commands.run(fine, time.monotonic() - 1, tmp_path)
    assert late.status == "not run: no time was left" and not late.output


def test_what_a_command_leaves_running_is_ended(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    leave = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid)"
    outcome = commands.run(python("leaves", leave), time.monotonic() + 60, tmp_path)
    assert outcome.has_passed
    state = Path(f"/proc/{int(outcome.output)}/stat")
    while state.exists() and state.read_text().split()[2] != "Z":  # killed, but perhaps collected later
        os.sched_yield()


def test_every_test_that_a_gpu_can_run_is_run() -> None:
    names = [command.name for command in script.test_commands({}, has_pytest=True)]
    cases = {p.stem for p in (ROOT / "tests" / "kernels" / "triton_cases").glob("*.py")} - {"common", "conftest"}
    groups = {p.stem for p in (ROOT / "benchmarks" / "gpu" / "kernel_cases").glob("*.py")} - {"common"}
    assert {f"cases: {name}" for name in cases} | {f"large: {name}" for name in groups} <= set(names)
    assert not any("test_triton" in name for name in names) and len(set(names)) == len(names)
    assert all("mark.gpu" in (ROOT / file).read_text() for file in script.APART)
    assert "tests/benchmarks/test_gpu_report.py" not in script.marked_files()
    without = script.test_commands({}, has_pytest=False)
    assert {command.name for command in without} == {f"large: {name}" for name in groups}


def test_what_serves_is_not_tested_where_a_part_of_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    served = "marked: tests/e2e/test_gpu_handoff.py"
    assert served in {command.name for command in script.test_commands({}, has_pytest=True)} and not script.not_served()
    monkeypatch.setattr(script, "find_spec", lambda name: None if name == "grpc_health" else True)
    assert served not in {command.name for command in script.test_commands({}, has_pytest=True)}
    assert script.not_served() == ["grpc_health"]


def test_a_tree_that_is_not_installed_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "find_spec", lambda _: None)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = script.importable(tmp_path)
    assert environment["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/elsewhere"
    code = "import diptych; print(diptych.__path__[0])"
    outcome = commands.run(python("linked", code, **environment), time.monotonic() + 60, tmp_path)
    assert outcome.output.strip() == str(tmp_path / "diptych")


def scripts_at(folder: Path, **sources: str) -> None:
    (folder / "benchmarks" / "gpu").mkdir(parents=True)
    for name, source in sources.items():
        (folder / "benchmarks" / "gpu" / f"{name}.py").write_text(source)


FAKE_KERNELS = """
import json, pathlib, sys
verdicts = [{"verdict": "MISSED: 10% of copy"}]
rows = [{"kernel": "copy", "shape": "1 | 2", "verdicts": verdicts}]
pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"results": rows}))
assert float(sys.argv[sys.argv.index("--seconds") + 1]) < 60
print("| kernel | shape |")
sys.exit(1)
"""


def test_steps_go_on_after_failures_and_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts_at(tmp_path, kernels=FAKE_KERNELS)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    steps = [report.Step("tests"), report.Step("kernels", 1.5), report.Step("engine")]
    steps[0].outcomes = [
        commands.Outcome("fine", "passed", 1.0, "3 passed\n"),
        commands.Outcome("pytest", "not run: no"),
    ]
    script.kernels(steps[1], time.monotonic() + 60, {}, tmp_path)
    script.engine(steps[2], time.monotonic() + 60, {}, tmp_path)
    script.write(tmp_path, {"device": "a | b"}, steps)
    text = (tmp_path / "report.md").read_text()
    for part in (
        "| device | a / b |",
        "| tests | 1 of 2 passed | 0 |",
        "| kernels | 0 of 1 passed | 2 |",
        "| fine | passed | 1 | 3 passed |",
        "### pytest: not run: no",
        "| copy | 1 / 2 | MISSED: 10% of copy |",
        "### kernels: failed (exit status 1)",
        "### engine_gpu.py: failed (exit status 1)",
    ):
        assert part in text, part
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["kernels"]["results"][0]["kernel"] == "copy" and told["steps"][2]["status"] == "0 of 1 passed"
    assert "===== kernels: failed" in (tmp_path / "log.txt").read_text()


def test_the_engine_is_told_what_it_asks_to_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import sys\nprint('ran', *sys.argv[1:])"
    scripts_at(tmp_path, engine_gpu=source)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    step = report.Step("engine")
    script.engine(step, time.monotonic() + 60, {}, tmp_path)
    assert step.outcomes[0].output.split()[:2] == ["ran", "--seconds"] and "engine.json" in step.outcomes[0].output
    assert "ran --seconds" in report.markdown({}, [step])  # passed steps are shown too


def test_a_script_that_was_cut_off_shows_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts_at(tmp_path, kernels="print('half a table')\nraise SystemExit('ended')")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    step = report.Step("kernels")
    script.kernels(step, time.monotonic() + 60, {}, tmp_path)
    assert not step.body and "half a table" in report.markdown({}, [step])
