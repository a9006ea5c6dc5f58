"""The command line as far as it goes without a cluster."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

import diptych
from diptych.cluster.cli import main as cli
from diptych.cluster.cli.main import app
from diptych.cluster.common import address_file
from diptych.cluster.common.config import ClusterConfig
from diptych.workers.common.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    DiptychError,
    InternalError,
    LeaseLost,
    Overloaded,
    PortInUse,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    WorkerLost,
    WorkloadError,
)
from diptych.workers.common.exit_codes import FAULT, FOUND, GIVEN, INTERRUPTED, UNAVAILABLE, exit_code
from diptych.workers.common.settings import Scope
from diptych.workers.config.worker_config import SETTINGS

from ...support.checkpoints import make_checkpoint
from ...support.other_settings import NEEDS, OTHER, SHARED_NEEDS
from ...workers.models.gguf.gguf_writer import write_gguf


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RAY_ADDRESS", "DIPTYCH_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def call(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """The settings that `serve` would have run with."""
    from diptych.cluster.cli import launcher

    seen: list[ClusterConfig] = []
    monkeypatch.setattr(launcher, "serve", lambda config, console: seen.append(config))
    return seen


def test_version() -> None:
    assert call("--version").stdout == f"diptych {diptych.__version__}\n"


def test_help_imports_neither_ray_nor_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom diptych.cluster.cli.main import app\n"
        "assert CliRunner().invoke(app, ['serve', '--help']).exit_code == 0\n"
        "sys.exit(bool({'ray', 'torch', 'grpc', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_flags_say_what_the_file_says(settings: list[ClusterConfig], tmp_path: Path) -> None:
    flags = "--prefill 2 --decode 3 --mixed 1 --name x --http-port 1 --grpc-port 2 --dtype float32 --chunk-tokens 64"
    more = "--kv-memory 1GiB --threads 2 --transport grpc --transport nixl --served-model-name m --max-context-tokens 9"
    kv = "--verify-kv --layer-groups 4"
    assert call("serve", str(tmp_path), *flags.split(), *more.split(), *kv.split()).exit_code == 0
    pool = "{replicas: %d, chunk_tokens: 64, layer_groups: 4, threads: 2, kv_memory_bytes: 1GiB}"
    (tmp_path / "cluster.yaml").write_text(
        f"""
model: {tmp_path}
name: x
dtype: float32
transports: [grpc, nixl]
served_model_name: m
max_context_tokens: 9
verify_kv: true
router: {{http_port: 1, grpc_port: 2}}
pools:
  prefill: {pool % 2}
  decode: {pool % 3}
  mixed: {pool % 1}
"""
    )
    assert call("serve", "--config", str(tmp_path / "cluster.yaml")).exit_code == 0
    assert settings[0] == settings[1]


@pytest.mark.parametrize("name", [name for name, each in SETTINGS.items() if each.scope is not Scope.PROCESS])
def test_every_setting_of_a_worker_is_a_flag_of_serve(settings: list[ClusterConfig], name: str) -> None:
    if name == "model":  # the argument
        return
    setting, value, flags = SETTINGS[name], OTHER[name], list[str]()
    for needed, other in ({name: value} | NEEDS.get(name, {}) | SHARED_NEEDS.get(name, {})).items():
        flag = SETTINGS[needed].flag
        if isinstance(other, bool):
            flags.append(flag if other else f"--no-{flag[2:]}")
        else:
            each = other if isinstance(other, tuple) else [other]
            flags += [part for item in each for part in (flag, str(item))]
    assert call("serve", "tiny", *flags).exit_code == 0
    worker = settings[0].worker("decode")
    assert getattr(getattr(worker, setting.section) if setting.section else worker, name) == value


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"prefill": 1, "decode": 1, "mixed": 0}),
        (["--prefill", "3"], {"prefill": 3, "decode": 1, "mixed": 0}),
        (["--decode", "2"], {"prefill": 1, "decode": 2, "mixed": 0}),
        (["--mixed", "2"], {"prefill": 0, "decode": 0, "mixed": 2}),
        (["--mixed", "1", "--prefill", "1"], {"prefill": 1, "decode": 0, "mixed": 1}),
        (["--prefill", "0", "--chunk-tokens", "8"], {"prefill": 0, "decode": 1, "mixed": 0}),
    ],
)
def test_pools_that_are_not_named(settings: list[ClusterConfig], flags: list[str], expected: dict[str, int]) -> None:
    assert call("serve", "tiny", *flags).exit_code == 0
    assert settings[0].pools.targets == expected


def test_a_flag_wins_over_the_file_and_leaves_the_rest(settings: list[ClusterConfig], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: a\npools:\n  prefill: {replicas: 1, num_cpus: 4}\n  decode: {replicas: 2}\n")
    assert call("serve", "b", "--config", str(path), "--prefill", "3", "--chunk-tokens", "8").exit_code == 0
    config = settings[0]
    assert Path(config.model).name == "b"
    assert config.pools.targets == {"prefill": 3, "decode": 2, "mixed": 0}
    assert (config.pools.prefill.num_cpus, config.pools.prefill.chunk_tokens) == (4, 8)


@pytest.mark.parametrize(("flags", "strict"), [([], False), (["--strict"], True), (["--no-strict"], False)])
def test_strict_is_a_flag_of_serve(settings: list[ClusterConfig], flags: list[str], strict: bool) -> None:
    assert call("serve", "tiny", *flags).exit_code == 0
    assert settings[0].router.strict is strict


def test_tiny_is_the_model_that_ships(settings: list[ClusterConfig]) -> None:
    call("serve", "tiny")
    assert Path(settings[0].model) == Path(diptych.__file__).parent / "examples" / "tiny"


def test_a_shipped_draft_has_a_name_and_another_is_a_path(
    settings: list[ClusterConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths begin where the command runs, as the model's does: a worker may run elsewhere."""
    monkeypatch.chdir(tmp_path)
    of_decode = "{speculation: self, skipped_layers: skipped.json}"
    of_mixed = "{replicas: 1, speculation: draft, draft_model: ./tiny_draft}"
    Path("cluster.yaml").write_text(f"model: tiny\npools:\n  decode: {of_decode}\n  mixed: {of_mixed}\n")
    assert call("serve", "--config", "cluster.yaml").exit_code == 0
    assert call("serve", "tiny", "--speculation", "draft", "--draft-model", "tiny_draft").exit_code == 0
    of_file, of_flags = settings
    assert of_file.worker("mixed").speculation.draft_model == str(tmp_path / "tiny_draft")
    assert of_file.worker("decode").speculation.skipped_layers == str(tmp_path / "skipped.json")
    assert of_file.worker("prefill").speculation.draft_model is None
    shipped = str(Path(diptych.__file__).parent / "examples" / "tiny_draft")
    assert [of_flags.worker(pool).speculation.draft_model for pool in ("prefill", "decode")] == [shipped] * 2


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["serve"], "model is missing. Give the folder of a Hugging Face checkpoint"),
        (["serve"], "`diptych serve tiny` for the model that ships with Diptych"),
        (["serve", "/absent"], "/absent does not exist"),
        (["serve", "tiny", "--dtype", "int4"], "dtype: "),
        (["serve", "tiny", "--speculation", "draft"], "pools.prefill.draft_model is missing"),
        (
            ["serve", "tiny", "--speculation", "draft", "--draft-model", "/absent"],
            "draft_model: /absent does not",
        ),
        (["serve", "tiny", "--host", "0.0.0.0"], "set api_key"),
        (["serve", "tiny", "--prefill", "-1"], "pools.prefill.replicas"),
        (["serve", "tiny", "--kv-memory", "lots"], "'lots' is not a size"),
        (["serve", "tiny", "--config", "/absent.yaml"], "cannot read /absent.yaml"),
        (["scale", "prefill"], "'prefill' is not POOL=N"),
        (["scale", "prefil=2"], "there is no pool 'prefil'. Did you mean 'prefill'?"),
        (["scale", "cats=2"], "'cats=2' is not POOL=N"),
        (["scale", "decode=-1"], "'decode=-1' is not POOL=N"),
        (["scale", "decode=1", "decode=2"], "decode is given twice"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args: list[str], expected: str) -> None:
    result = call(*args)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["status"], ["scale", "decode=2"], ["stop"]])
def test_commands_without_a_cluster_say_so(command: list[str]) -> None:
    result = call(*command)
    assert result.exit_code == 3
    assert "no cluster named 'default' runs here: start one" in result.stderr


@pytest.mark.parametrize("command", [["status"], ["scale", "decode=2"], ["stop"]])
def test_commands_for_a_cluster_that_does_not_run_list_those_that_do(command: list[str]) -> None:
    this = psutil.Process()
    started = address_file.start_of(this)
    for name, pid in (("one", this.pid), ("two", this.pid), ("ended", 1 << 30)):
        address_file.write(address_file.ClusterAddress(name, "127.0.0.1:1", None, True, pid, started))
    result = call(*command)
    assert result.exit_code == 3
    assert "no cluster named 'default' runs here. Those that run: one, two; say --name" in result.stderr


def test_the_key_of_metrics_comes_from_the_environment(
    settings: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_METRICS_KEY", "only-for-metrics")
    assert call("serve", "tiny").exit_code == 0
    assert settings[0].router.metrics_key == "only-for-metrics"
    assert "metrics-key" not in call("serve", "--help").stdout
    monkeypatch.setenv("DIPTYCH_METRICS_KEY", "short")
    result = call("serve", "tiny")
    assert (result.exit_code, "DIPTYCH_METRICS_KEY: " in result.stderr, "'short'" in result.stderr) == (2, True, False)


def test_the_remedy_names_the_variable_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_API_KEY", "short")
    result = call("serve", "tiny")
    assert (result.exit_code, "DIPTYCH_API_KEY: " in result.stderr) == (2, True)
    assert "'short'" not in result.stderr, "a key is not for a terminal"
    monkeypatch.delenv("DIPTYCH_API_KEY")
    assert "router.api_key: " in call("serve", "tiny", "--api-key", "short").stderr
    monkeypatch.setenv("RAY_ADDRESS", "ray://host:10001")
    result = call("serve", "tiny")
    assert (result.exit_code, "RAY_ADDRESS must be HOST:PORT" in result.stderr) == (2, True)


def test_plan_reads_the_header_of_a_gguf_file(tmp_path: Path) -> None:
    path, plain = write_gguf(make_checkpoint(tmp_path / "source", "llama", 1), tmp_path)
    found, expected = (call("plan", str(of), "--rank-memory", "1GiB").stdout.splitlines() for of in (path, plain))
    assert found[0] == "model.gguf: LlamaForCausalLM, 3 layers, bfloat16, one rank, blocks of 16 tokens"
    assert "  weights of the checkpoint stay in its own bits" in found
    names = [line.split()[0] for line in expected[1:]]
    assert [line.split()[0] for line in found[1:] if "own bits" not in line] == names


def test_plan_needs_no_flag_where_there_is_one_thing_to_plan() -> None:
    assert call("plan", "tiny").exit_code == 0
    assert call("plan", "tiny").stdout.splitlines()[0] == call("plan", "tiny", "--memory").stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (PortInUse("x"), 2),
        (CheckpointError("x"), 2),
        (UnknownModel("x"), 2),
        (Unauthenticated("x"), 2),
        (WorkloadError("x"), 2),
        (Unavailable("x"), 3),
        (WorkerLost("x"), 3),
        (DeadlineExceeded("x"), 3),
        (Overloaded("x"), 3),
        (InternalError("x"), 1),
        (LeaseLost("x"), 1),
    ],
)
def test_the_same_kind_of_mistake_has_the_same_exit_code(
    error: DiptychError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diptych.cluster.cli import launcher

    def fail(config: object, console: object) -> None:
        raise error

    monkeypatch.setattr(launcher, "serve", fail)
    assert call("serve", "tiny").exit_code == exit_code(error) == code


def test_every_exit_code_is_in_the_table() -> None:
    table = (Path(diptych.__file__).parent / "docs" / "cli.md").read_text()
    assert re.findall(r"^\| (\d+) \|", table, re.MULTILINE) == [
        str(code) for code in (0, FAULT, GIVEN, UNAVAILABLE, FOUND, INTERRUPTED)
    ]
    assert "docs/cli.md" in call("--help").stdout


@pytest.mark.parametrize("error", [KeyboardInterrupt])
def test_ctrl_c_ends_any_command_with_130(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str) -> None:
        raise error

    monkeypatch.setattr(address_file, "read", interrupt)
    result = call("status")
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), "diptych serve tiny"),
        (("ARGS=--config c.yaml",), "diptych serve --config c.yaml"),
        (("ARGS=--decode 2",), "diptych serve tiny --decode 2"),
        (("MODEL=/m", "ARGS=--config c.yaml"), "diptych serve /m --config c.yaml"),
    ],
)
def test_make_serve_overrules_no_setting_of_a_file(args: tuple[str, ...], expected: str) -> None:
    command = ["make", "--dry-run", "--assume-old=.venv/.installed", "serve", *args]
    done = subprocess.run(command, cwd=Path(diptych.__file__).parent, capture_output=True, text=True, check=True)
    assert expected in [" ".join(line.partition("bin/")[2].split()) for line in done.stdout.splitlines()]


def test_an_unknown_flag_is_a_usage_error() -> None:
    result = call("serve", "tiny", "--prefil", "2")
    assert result.exit_code == 2
    assert "--prefill" in result.stderr


def test_the_address_file_is_its_owners_alone(home: Path) -> None:
    address = address_file.ClusterAddress("default", "127.0.0.1:1", None, True, 1, 2.0)
    address_file.write(address)
    assert address_file.read("default") == address
    assert (home / "default.json").stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700
    address_file.remove("default")
    assert address_file.read("default") is None


def test_a_clock_that_is_set_hides_no_cluster(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil adds up the start of the machine, which the kernel counts back from the clock, and what has passed."""
    this = psutil.Process()
    address = address_file.ClusterAddress("default", "127.0.0.1:1", None, True, this.pid, address_file.start_of(this))
    created = this.create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: created + 3600)
    assert address_file.serving_process(address) == this
    assert address_file.serving_process(replace(address, started=address.started - 1)) is None


def test_an_interrupted_write_of_the_address_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", interrupt)
    with pytest.raises(KeyboardInterrupt):
        address_file.write(address_file.ClusterAddress("default", "127.0.0.1:1", None, True, 1, 2.0))
    assert [path.name for path in home.iterdir()] == ["default.part"]
    address_file.remove("default")
    assert not list(home.iterdir())


def test_a_damaged_address_file_is_named(home: Path) -> None:
    home.mkdir()
    (home / "default.json").write_text(json.dumps({"name": "default"}))
    result = call("status")
    assert result.exit_code == 2
    assert "default.json is damaged" in result.stderr


def test_doctor_finds_something_to_say_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("doctor")
    assert result.exit_code == 0
    for name in (
        "Python",
        "torch",
        "ray",
        "nixl",
        "CPU",
        "CPU kernels",
        "memory",
        "huge pages",
        "HTTP port",
        "gRPC port",
    ):
        assert f"{name}: " in result.stdout


def test_the_command_is_installed() -> None:
    assert cli.main.__module__ == "diptych.cluster.cli.main"
