"""benchmarks/gpu/gpu_report.py: its parts on a fake device, what the loss of one costs, and what it writes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import gpu_report as script
from benchmarks.gpu.report import jobs, page, parts, rows
from diptych.kernels.common.untried import VARIABLE

ROOT = Path(__file__).parents[2]
ON_FAKE = (sys.executable, "-m", "benchmarks.gpu.gpu_report", "--device", "fake", "--budget", "3600")
# Hides packages that are installed; what stands in for one is not hidden.
HIDING = """
import os
from importlib.machinery import PathFinder
find, hidden = PathFinder.find_spec, os.environ["HIDDEN"].split()
def find_spec(name, path=None, target=None):
    spec = find(name, path, target)
    return None if name in hidden and spec is not None and "stand_ins" not in str(spec.origin) else spec
PathFinder.find_spec = find_spec
"""


def python(name: str, code: str, **environment: str) -> jobs.Job:
    return jobs.Job(name, (sys.executable, "-c", code), environment)


def start(out: Path, only: Sequence[str] = (), *flags: str, **environment: str) -> "subprocess.Popen[str]":
    argv = (*ON_FAKE, "--out", str(out), *(["--only", *only] if only else []), *flags)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def parts_of(out: Path) -> dict[str, Any]:
    return {part["name"]: part for part in json.loads((out / "report.json").read_text())["parts"]}


def kinds(part: dict[str, Any]) -> set[str]:
    return {row["kind"] for row in part["rows"]}


@pytest.mark.slow
def test_every_part_runs_on_a_fake_device_and_is_written(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output + (tmp_path / "report.md").read_text()
    found = parts_of(tmp_path)
    assert [*found] == [name for name in parts.PARTS if name not in parts.ON_REQUEST]
    assert found["peers"]["status"] == "skipped: there is nothing to compile for"
    assert all(part["status"] == "passed" for name, part in found.items() if name != "peers")
    launches = [row for row in found["discover"]["rows"] if row["kind"] == "launches"]
    assert {row["group"] for row in launches} == set(parts.groups())
    assert all(row["state"] == "right" for row in launches)
    assert {"facts", "packages", "modules"} < kinds(found["discover"])
    check_engine(found["engine"]["rows"])
    agreed = found["exact"]["rows"]
    assert {row["dtype"] for row in agreed} == {"float32", "bfloat16"} and len(agreed) == 2 * 2 * 2
    exact = [row for row in agreed if row["dtype"] == "float32"]
    assert all(row["tokens that agree"] == "60 of 60" and 0 < row["error"] < 1e-4 for row in exact)
    assert [row.get("bytes") for row in found["handoff"]["rows"]] == [*[None] * 3, *["right"] * 3]
    assert "kernels" in kinds(found["kernels"])
    text = (tmp_path / "report.md").read_text()
    assert "fake device: no figure means anything" in text
    assert all(f"## {name}\n" in text for name in found)
    assert " passed" in found["tests"]["outcomes"][0]["output"]


def check_engine(found: list[dict[str, Any]]) -> None:
    for graphs in (True, False):
        own = [row for row in found if row.get("graphs") is graphs]
        what = {row["what"] for row in own if row["kind"] == "figures"}
        assert {"loading", "decode step", "decode", "host gap a step", "prefill", "serving", "memory"} < what
        profiles = [row for row in own if row["kind"] == "profile"]
        assert {row["of"] for row in profiles} == {"decode, batch 3, context 40", "prefill, 1 prompt of 50"}
        assert all(row["us a step"] > 0 and 0 < row["share"] <= 1 for row in profiles)


@pytest.mark.slow
def test_a_part_whose_processes_are_killed_costs_only_itself(tmp_path: Path) -> None:
    with start(tmp_path, ["engine", "handoff"]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("engine: tiny") and " is process " in line:
                os.kill(int(line.split()[-1]), signal.SIGKILL)
    assert process.returncode == 1
    found = parts_of(tmp_path)
    assert [o["status"] for o in found["engine"]["outcomes"]] == ["killed by SIGKILL"] * 4
    assert found["handoff"]["status"] == "passed"
    assert [row.get("bytes") for row in found["handoff"]["rows"]] == [*[None] * 3, *["right"] * 3]
    text = (tmp_path / "report.md").read_text()
    assert "| engine | 0 of 4 passed |" in text and "| handoff | passed |" in text
    assert "### tiny, eager: killed by SIGKILL" in text


@pytest.mark.slow
def test_jobs_are_chosen_by_their_names(tmp_path: Path) -> None:
    with start(tmp_path, ["engine", "handoff"], "--jobs", "tiny, nothing*", "CUDA*") as process:
        assert process.stdout is not None
        process.stdout.read()
    assert process.returncode == 0
    found = parts_of(tmp_path)
    assert found["engine"]["status"] == "skipped: none of its jobs was asked for"
    assert [o["name"] for o in found["handoff"]["outcomes"]] == ["CUDA IPC"] and found["handoff"]["status"] == "passed"


@pytest.mark.slow
def test_a_report_that_is_ended_is_written(tmp_path: Path) -> None:
    with start(tmp_path, ["engine", "handoff"]) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.terminate()
        process.stdout.read()
    assert process.returncode == 1
    found = parts_of(tmp_path)
    statuses = [o["status"] for part in found.values() for o in part["outcomes"]]
    assert statuses == ["killed by SIGKILL", *["not run: the report was ended"] * 4]
    until_ended(int(first.split()[-1]))


@pytest.mark.slow
def test_it_runs_without_packages_that_may_be_missing_and_names_them(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    hidden = "pydantic pydantic_core grpc grpc_health grpc_reflection blake3 nixl ray"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with start(tmp_path / "out", ["engine", "handoff"], HIDDEN=hidden, PYTHONPATH=path) as process:
        process.communicate()
    found = parts_of(tmp_path / "out")
    assert {name: part["status"] for name, part in found.items()} == {"engine": "passed", "handoff": "passed"}
    check_engine(found["engine"]["rows"])
    told = json.loads((tmp_path / "out" / "report.json").read_text())["facts"]["tests of workers that serve"]
    assert told == "not run: without grpc_health, grpc_reflection, blake3, pydantic"
    stand_ins = str(ROOT / "benchmarks" / "gpu" / "report" / "stand_ins")
    named = rows.environment(tmp_path / "facts.jsonl", "discover", "machine")
    environment = {"HIDDEN": hidden, "PYTHONPATH": os.pathsep.join([stand_ins, path]), **named}
    argv = ("-m", "benchmarks.gpu.report.facts", "--device", "fake")
    subprocess.run((sys.executable, *argv), cwd=ROOT, env={**os.environ, **environment}, check=True)
    packages = {row["name"]: row for row in rows.read(tmp_path / "facts.jsonl") if row["kind"] == "packages"}
    assert packages["grpcio"]["problem"] == "not installed" and "serve" in packages["grpcio"]["fails without it"]
    assert packages["pydantic"]["problem"].startswith("not installed: what stands in")
    assert "problem" not in packages["torch"]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    monkeypatch.setattr("sys.argv", ["gpu_report.py"])
    assert script.main() == 1
    told = capsys.readouterr()
    assert not told.out and told.err == "This measures a GPU, and torch sees none here.\n"


def test_jobs_fail_and_are_cut_off_by_themselves(tmp_path: Path) -> None:
    fine = python("fine", "import os; print(os.environ['WORD'], os.getcwd())", WORD="heard")
    broken = python("broken", "import sys; print('why'); sys.exit(3)")
    gone = jobs.Job("gone", ("/no/such/program",))
    killed = python("killed", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    far = time.monotonic() + 60
    done: list[jobs.Outcome] = []
    passed, failed, absent, crashed = jobs.run_all([fine, broken, gone, killed], far, tmp_path, 2, done=done.append)
    assert passed.has_passed and passed.output.split() == ["heard", str(tmp_path)] and "WORD=heard" in passed.command
    assert failed.status == "failed (exit status 3)" and failed.output == "why\n"
    assert absent.status.startswith("not run: ") and crashed.status == "killed by SIGSEGV"
    assert {outcome.name for outcome in done} == {"fine", "broken", "gone", "killed"}
    late = jobs.run(fine, time.monotonic() - 1, tmp_path)
    assert late.status == "not run: no time was left" and not late.output
    told = jobs.run(python("told", f"print('{jobs.SECONDS}')"), time.monotonic() + 60, tmp_path)
    assert int(told.output) <= 60 - jobs.GRACE_S - jobs.EARLIER_S


def test_what_is_cut_off_is_interrupted_first() -> None:
    """Also where these tests run in a shell's background, which ignores SIGINT."""
    code = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n print('begun', flush=True)\n time.sleep(600)\nexcept KeyboardInterrupt:\n print('found so far')"
    )
    argv = (sys.executable, "-c", code)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        jobs.interrupt(process, 60.0)
        assert process.poll() == 0 and process.stdout.read() == "found so far\n"


def test_what_does_not_heed_it_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    pids: list[int] = []
    cut = jobs.run(python("stubborn", code), time.monotonic() + 2, tmp_path, begun=pids.append)
    assert cut.status.startswith("cut off after") and not Path(f"/proc/{pids[0]}").exists()


def test_what_a_job_leaves_running_is_ended(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    leave = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid)"
    outcome = jobs.run(python("leaves", leave), time.monotonic() + 60, tmp_path)
    assert outcome.has_passed
    until_ended(int(outcome.output))


def until_ended(process: int) -> None:
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{process}/stat").read_text().split()[2] != "Z":  # killed, but perhaps collected later
            os.sched_yield()


def test_time_that_a_job_leaves_is_the_next_ones(tmp_path: Path) -> None:
    """By the number that each is told: alone, a job of weight 3 of 4 may take three quarters."""
    code = f"print('{jobs.SECONDS}')"
    own = [jobs.Job(name, (sys.executable, "-c", code), {}, weight) for name, weight in (("a", 3.0), ("b", 1.0))]
    first, second = jobs.run_all(own, time.monotonic() + 1000, tmp_path, 1)
    assert 700 < int(first.output) < 750 and 900 < int(second.output) < 1000


def test_a_part_has_its_share_and_what_others_left() -> None:
    every = parts.ends(parts.PARTS)
    assert list(every) == list(parts.PARTS) and every["tests"] == pytest.approx(1.0)
    assert every["peers"] == every["kernels"] < every["tests"]
    assert parts.ends(["discover"]) == {"discover": 1.0}
    assert parts.ends(["handoff", "tests"])["handoff"] == pytest.approx(0.3, abs=0.01)


def test_every_test_that_a_gpu_can_run_is_run() -> None:
    names = [job.name for job in parts.test_jobs(has_pytest=True)]
    cases = {p.stem for p in (ROOT / "tests" / "kernels" / "triton_cases").glob("*.py")} - {"common", "conftest"}
    assert {f"cases: {name}" for name in cases} | {f"large: {name}" for name in parts.groups()} <= set(names)
    assert not any("test_triton" in name for name in names) and len(set(names)) == len(names)
    assert all("mark.gpu" in (ROOT / file).read_text() for file in parts.APART)
    assert "tests/benchmarks/test_gpu_report.py" not in parts.marked_files()
    without = parts.test_jobs(has_pytest=False)
    assert {job.name for job in without} == {f"large: {name}" for name in parts.groups()}


def test_every_kernel_is_measured_and_every_model_without_graphs_too() -> None:
    setup = parts.Setup()
    planned = {name: parts.plan(name, setup) for name in ("engine", "kernels", "exact")}
    names = {name: [job.name for job in found[0]] for name, found in planned.items()}
    assert sorted(names["kernels"]) == [f"kernels: {group}" for group in parts.groups()]
    assert names["engine"][:2] == ["8b, graphs", "8b, eager"] and len(names["engine"]) == 9 + len(parts.FEW_BITS)
    assert names["exact"][: len(parts.FAMILIES)] == [f"exact: {family}" for family in parts.FAMILIES]


def test_what_has_not_run_on_a_gpu_is_measured_and_held_against_transformers_too() -> None:
    jobs = [job for name in ("engine", "exact") for job in parts.plan(name, parts.Setup())[0]]
    untried = {job.name: dict(job.environment) for job in jobs if "untried" in job.name}
    found = ["8b", "v2-lite", "exact: llama", "exact: deepseek-v3"]
    assert untried == {f"{name}, untried kernels": {VARIABLE: "all"} for name in found}
    assert all(VARIABLE not in job.environment for job in jobs if job.name not in untried)


def test_what_serves_is_not_tested_where_a_part_of_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    served = "marked: tests/e2e/test_gpu_handoff.py"
    assert served in {job.name for job in parts.test_jobs(has_pytest=True)} and not parts.not_served()
    monkeypatch.setattr(parts, "find_spec", lambda name: None if name == "grpc_health" else True)
    assert served not in {job.name for job in parts.test_jobs(has_pytest=True)}
    assert parts.not_served() == ["grpc_health"]


def test_the_sanitizer_checks_every_group_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert parts.plan("sanitize", parts.Setup()) == "skipped: compute-sanitizer is not there"
    monkeypatch.setattr("shutil.which", lambda name: f"/tools/{name}")
    found, at_once = parts.plan("sanitize", parts.Setup())
    assert at_once == 1 and [job.name for job in found[1:]] == [f"memcheck: {group}" for group in parts.groups()]
    assert all(job.argv[0] == "/tools/compute-sanitizer" for job in found)
    assert all(job.environment["KERNEL_CASES"] == "small" for job in found[1:])


def test_a_tree_that_is_not_installed_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: None if name == "diptych" else True)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = parts.importable(tmp_path)
    assert environment["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/elsewhere"
    code = "import diptych; print(diptych.__path__[0])"
    outcome = jobs.run(python("linked", code, **environment), time.monotonic() + 60, tmp_path)
    assert outcome.output.strip() == str(tmp_path / "diptych")


def test_rows_are_lines_at_once_and_half_a_line_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.jsonl"
    rows.put("figures", value=1.0)  # without a report there is no file
    for name, value in rows.environment(file, "engine", "8b").items():
        monkeypatch.setenv(name, value)
    rows.put("figures", value=2.5, share=float("nan"))
    with file.open("a") as written:
        written.write('{"part": "engine", "kind": "fig')
    assert rows.read(file) == [{"part": "engine", "job": "8b", "kind": "figures", "value": 2.5, "share": "nan"}]


def test_a_page_shows_rows_and_failures_and_what_is_missing() -> None:
    broken = jobs.Outcome("tiny", "failed (exit status 1)", 2.0, "so | far\nwhy\n", "python -m it")
    found = [page.Part("engine", 2.0, [broken]), page.Part("peers", why="skipped: none"), page.Part("tests")]
    row = {"part": "engine", "job": "tiny", "kind": "figures", "what": "a | b", "value": 0.123456, "graphs": True}
    text = page.markdown({"device": page.FAKE}, found, [row, {**row, "unit": "ms"}])
    for part in (
        f"**{page.FAKE}.**",
        "| engine | 0 of 1 passed | 2 | 2 |",
        "| peers | skipped: none | 0 | 0 |",
        "| tests | not run yet | 0 | 0 |",
        "| job | what | value | graphs | unit |",
        "| tiny | a / b | 0.1235 | yes | ms |",
        "### tiny: failed (exit status 1)",
        "`python -m it`",
        "so | far",
    ):
        assert part in text, part
    assert page.as_json({}, found, [row])["parts"][0]["rows"] == [row]
    assert page.is_well(found[1:], []) and not page.is_well(found, [])
    assert not page.is_well(found[1:], [{"kind": rows.PROBLEM}])


def test_packages_of_other_people_are_not_taken_for_ours(tmp_path: Path) -> None:
    """Some install their tests, or benchmarks, under these names, and a package goes before folders that are none."""
    for name in ("tests", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    for argv in (("-m", "benchmarks.gpu.gpu_report", "--help"), ("-c", "import tests.support.drafters")):
        subprocess.run((sys.executable, *argv), cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
