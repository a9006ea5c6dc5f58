"""What only a server needs is found where it is installed, and named where it is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from diptych.cluster.preflight.doctor import Verdict, _kernels, _serving  # pyright: ignore[reportPrivateUsage]
from diptych.workers.common.errors import ConfigError
from diptych.workers.common.exit_codes import GIVEN
from diptych.workers.config.extras import INSTALL, SERVING, check_installed, missing_to_serve


def lose(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, SERVING[package], None)


def test_a_server_lacks_nothing() -> None:
    assert missing_to_serve() == []
    check_installed("`diptych serve`")
    assert _serving().verdict is Verdict.OK


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, "ray", "grpcio-reflection", "uvicorn")
    assert missing_to_serve() == ["ray", "grpcio-reflection", "uvicorn"]
    with pytest.raises(ConfigError) as e:
        check_installed("`diptych serve`")
    assert e.value.message.startswith(
        "`diptych serve` needs ray, grpcio-reflection and uvicorn, which are not installed"
    )
    assert e.value.message.endswith(INSTALL)
    with pytest.raises(ConfigError, match="needs ray, which is not installed"):
        check_installed("a command", ("ray", "torch"))
    check_installed("`diptych quantize`", ("torch", "safetensors"))


def test_a_folder_of_that_name_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray keeps its files in a folder `ray`, and Python finds folders beside the caller."""
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert missing_to_serve(("ray",)) == ["ray"]


def test_doctor_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, "torch", "starlette")
    packages, kernels = _serving(), _kernels()
    assert (packages.verdict, packages.detail) == (Verdict.FAILED, "not installed: starlette")
    assert packages.remedy == kernels.remedy == INSTALL and kernels.verdict is Verdict.WARNING


def test_a_worker_by_hand_names_what_a_client_s_installation_lacks() -> None:
    """In a process that can import none of it, as after `pip install diptych`."""
    lean = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({tuple(SERVING.values())!r}))\n"
        "sys.argv = ['worker', '--model', 'x']\n"
        "from diptych.workers.server.worker import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", lean], capture_output=True, text=True, check=False)
    assert done.returncode == GIVEN, done.stderr
    assert done.stderr.startswith(
        "error: a worker needs torch, grpcio-health-checking, grpcio-reflection and safetensors"
    )
    assert done.stderr.count("\n") == 1 and INSTALL in done.stderr
