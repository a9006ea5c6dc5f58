"""At every end of `diptych serve` it names the reason and leaves nothing: bad input, an early signal, a kill."""

import json
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from diptych.cluster.preflight.checks import resolve_model

from ..support.checkpoints import make_checkpoint
from ..support.cluster_harness import MODEL, diptych, serving, survivors

pytestmark = pytest.mark.e2e

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--kv-memory", "64MiB")


def refusal(home: Path, *args: str) -> tuple[int, str]:
    """Exit code and message of a `diptych serve` that must not come up, and that leaves no process."""
    before = {p.pid for p in psutil.process_iter()}
    run = diptych(home, "serve", *args)
    assert "Traceback" not in run.stdout + run.stderr
    assert run.stderr.startswith("error: "), run.stderr
    left = [p for p in psutil.process_iter(["environ"]) if p.pid not in before and str(home) in str(p.info["environ"])]
    assert not survivors(left)
    return run.returncode, run.stderr


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    code, message = refusal(tmp_path, str(tmp_path / "absent"), *ANY_PORTS)
    assert code == 2
    assert "absent does not exist" in message


def test_an_unknown_key_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(f"model: {MODEL}\npools:\n  decode:\n    replica: 2\n")
    code, message = refusal(tmp_path, "--config", "cluster.yaml")
    assert code == 2
    assert "cluster.yaml line 4: pools.decode.replica: unknown key. Did you mean 'replicas'?" in message


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_port_in_use(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, message = refusal(tmp_path, MODEL, *ANY_PORTS, flag, port)
    assert code == 2
    assert f"port {port} on 127.0.0.1 is in use. Choose another with {flag}" in message


def test_ranks_that_cannot_share_the_model(tmp_path: Path) -> None:
    code, message = refusal(tmp_path, MODEL, *ANY_PORTS, "--tensor-parallel", "3")
    assert code == 2
    assert "pools.prefill: tensor_parallel=3 does not divide the model's 8 attention heads" in message


@pytest.mark.cluster
def test_more_than_the_machine_has(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(f"model: {MODEL}\npools:\n  decode:\n    resources: {{tpu: 1}}\n")
    code, message = refusal(tmp_path, *ANY_PORTS, "--config", "cluster.yaml")
    assert code == 2
    assert "each worker needs 1 tpu and this machine has 0" in message


def with_a_wrong_shape(checkpoint: Path) -> str:
    edit_config(checkpoint, intermediate_size=168)
    return "shape"


def with_a_damaged_tokenizer(checkpoint: Path) -> str:
    (checkpoint / "tokenizer.json").write_text("{}")
    return "tokenizer.json"


def edit_config(checkpoint: Path, **changes: object) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("sharded") / "llama", "llama", seed=3, max_shard_size="200KB")
    shutil.copy(Path(resolve_model(MODEL)) / "tokenizer.json", folder)
    return folder


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("spoil", "pools"),  # two workers that fail immediately, and a router beside a worker that does not fail
    [(with_a_wrong_shape, ()), (with_a_damaged_tokenizer, ("--mixed", "1"))],
)
def test_a_checkpoint_that_cannot_be_served(
    tmp_path: Path, checkpoint: Path, spoil: Callable[[Path], str], pools: tuple[str, ...]
) -> None:
    spoiled = tmp_path / "model"
    shutil.copytree(checkpoint, spoiled)
    expected = spoil(spoiled)
    code, message = refusal(tmp_path, str(spoiled), *ANY_PORTS, *pools)
    assert code == 2
    assert expected in message
    assert not list(tmp_path.glob("default.*"))


@pytest.mark.cluster
@pytest.mark.parametrize(("moment", "pools"), [("checked", ()), ("Ray runs", ("--mixed", "8"))])
def test_ctrl_c_while_it_starts(tmp_path: Path, moment: str, pools: tuple[str, ...]) -> None:
    """Right after the phase was reported that names `moment`: in the middle of the next one, which is long where more
    workers start than the machine has cores."""
    with serving(tmp_path / "home", *pools, wait=False) as cluster:
        cluster.wait_for(moment)
        family = cluster.family()
        assert cluster.end(signal.SIGINT) == 130
        assert not survivors(family)
        assert cluster.last_line() == "stopping"
        assert not list(cluster.home.iterdir())


@pytest.mark.cluster
def test_a_kill_of_the_command_ends_its_cluster(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "--mixed", "1") as cluster:
        family = cluster.family()
        assert len(family) > 5
        cluster.end(signal.SIGKILL)
        assert not survivors(family)
        run = diptych(cluster.home, "status")
        assert run.returncode == 3
        assert "has ended" in run.stderr
