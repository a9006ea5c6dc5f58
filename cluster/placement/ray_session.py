"""A Ray cluster to run on: ours, started here and ended with us, or one that is there already.

Ours listens on loopback alone and refuses callers without the token; the latter is checked, not believed. Its processes
die with this one even if it is killed (session_watchdog.py), so nothing of it can outlive us.
"""

import os
import secrets
import shutil
import socket
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...workers.common.errors import ConfigError, DiptychError, Unavailable
from ..common.deployment import NAMESPACE
from . import lean_ray
from .gcs_keeper import GcsKeeper, store_in, wait_long
from .session_watchdog import SessionWatchdog

# Ray counts logical CPUs to place actors, and each of ours takes one: on a laptop more workers than cores is a choice
# that we let a person make, so the count must not stand in the way. Torch's threads are set apart from it.
LOGICAL_CPUS = 64
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes: nothing of ours travels through it
CONNECT_S = 5.0
GCS_METHOD = "/ray.rpc.InternalKVGcsService/InternalKVKeys"
END_S = 5.0
LONGEST_TEMP_PATH = 40  # a Unix socket's path may have 107 characters, and Ray adds 60 of them


@dataclass(frozen=True, slots=True)
class RaySession:
    address: str  # host:port of Ray's GCS
    token_path: Path | None
    watchdog: SessionWatchdog | None = None  # of a Ray that is ours
    node: Any = None  # of a Ray that is ours, where lean_ray.py started it
    keeper: GcsKeeper | None = None  # of that node
    enforces_token: bool = True

    @property
    def is_ours(self) -> bool:
        return self.watchdog is not None

    def save_logs(self, folder: Path) -> None:
        """Copy the logs of a Ray that is ours, which `close` removes."""
        if self.watchdog:
            logs = self.watchdog.folder / "ray" / "session_latest" / "logs"
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(shutil.Error):  # deleted files, for example; the others are copied
                shutil.copytree(logs, folder, ignore_dangling_symlinks=True)

    def close(self) -> None:
        """Disconnect; end every process of a Ray that is ours and wait until they are gone."""
        import ray

        # On a thread: it waits for Ray's GCS, which may be away for longer than anybody waits for a command.
        disconnecting = threading.Thread(target=ray.shutdown, daemon=True)
        disconnecting.start()
        disconnecting.join(END_S)
        if self.keeper:
            self.keeper.close()
        if self.node:
            self.node.kill_all_processes(check_alive=False, allow_graceful=True)
        if self.watchdog:
            self.watchdog.end(END_S)


def start_ours(token_path: Path, *, dashboard: bool) -> RaySession:
    """Start a Ray of our own on loopback. Raises ConfigError if it would answer to a caller without the token."""
    _set_environment(token_path, is_local=True)
    if not dashboard:
        lean_ray.apply_settings()
    is_lean = not dashboard and lean_ray.is_known()
    import ray

    temp_dir = Path(tempfile.mkdtemp(prefix="diptych-", dir=_temp_root()))
    watchdog = SessionWatchdog(temp_dir)
    num_cpus, node = max(os.cpu_count() or 1, LOGICAL_CPUS), None
    try:
        if is_lean:
            store_in(temp_dir / "gcs")
            node = lean_ray.start(temp_dir / "ray", num_cpus=num_cpus, object_store_bytes=OBJECT_STORE_BYTES)
            ray.init(address=node.address, **_quietly())
        else:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=dashboard,
                dashboard_host="127.0.0.1",
                _temp_dir=str(temp_dir / "ray"),
                **_quietly(),
            )
        address = ray.get_runtime_context().gcs_address
        if not refuses(address, token=None):
            raise ConfigError("Ray accepts callers without its token: install the version that pyproject.toml names")
    except BaseException as e:
        ray.shutdown()
        watchdog.end(0.0)
        # Ray raises bare Exceptions, too.
        if isinstance(e, Exception) and not isinstance(e, DiptychError):
            raise Unavailable(f"Ray does not start: {_first_line(e)}. Try `diptych doctor`") from e
        raise
    return RaySession(address, token_path, watchdog, node, GcsKeeper(node) if node else None)


def join(address: str, token_path: Path | None, *, is_local: bool = False) -> RaySession:
    """Connect to a running Ray ("auto": the one on this machine). Raises Unavailable or ConfigError if it cannot be."""
    _set_environment(token_path, is_local=is_local)
    # How often Ray tries again, half a minute each, where the address answers and yet cannot be used.
    os.environ.setdefault("RAY_nums_py_gcs_reconnect_retry", "1")
    if address != "auto":
        _check_joinable(address)
    import ray

    try:
        ray.init(address=address, **_quietly())
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise Unavailable(
            f"cannot join the Ray at {address}: {_first_line(e)}. Check RAY_ADDRESS and RAY_AUTH_TOKEN_PATH"
        ) from e
    found = ray.get_runtime_context().gcs_address
    return RaySession(found, token_path, enforces_token=refuses(found, token=None))


def _check_joinable(address: str) -> None:
    """Raises Unavailable or ConfigError at once for what Ray would try for half a minute."""
    if "://" in address:
        raise ConfigError(f"RAY_ADDRESS must be HOST:PORT of the head of Ray, for example 10.0.0.1:6379, got {address}")
    if not _answers(address):
        raise Unavailable(f"no Ray answers at {address}: start one with `ray start --head`, or unset RAY_ADDRESS")
    if not refuses(address, token=None):
        return
    token, source = _token()
    if token is None:
        raise ConfigError(
            f"the Ray at {address} requires a token: set RAY_AUTH_TOKEN_PATH to the file that contains it"
        )
    if refuses(address, token=token):
        raise ConfigError(f"the Ray at {address} does not accept the token of {source}: use that Ray's token")
    os.environ["RAY_AUTH_MODE"] = "token"


def _token() -> tuple[str | None, str]:
    """Ray's secret, from where Ray takes it, and the name of that. Raises ConfigError for a file that is not there."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token, "RAY_AUTH_TOKEN"
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    place = Path(named) if named else Path.home() / ".ray" / "auth_token"
    source = f"RAY_AUTH_TOKEN_PATH ({place})" if named else f"{place} (RAY_AUTH_TOKEN_PATH names another)"
    try:
        return place.read_text().strip(), source
    except OSError as e:
        if named:
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH: cannot read {place}: {e.strerror}. Check the path") from e
        return None, source


def make_token(path: Path) -> Path:
    """A new secret at `path`, readable by its owner alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return path


def refuses(address: str, token: str | None) -> bool:
    """Return whether Ray's GCS turns away a caller with this token, or with none."""
    import grpc

    # Ray's own stubs would import Ray, and what it reads of its environment is not settled yet. An empty message asks
    # for the keys of a namespace that nobody uses.
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(GCS_METHOD)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        try:
            call(b"", timeout=CONNECT_S, metadata=metadata)
        except grpc.RpcError as e:
            return e.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    return False


def _set_environment(token_path: Path | None, *, is_local: bool) -> None:
    """Set Ray's environment before it is first imported: it reads most of this once, and its processes inherit it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    wait_long()
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # Ray would run its actors at the lowest priority but four: ours serve people.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if token_path is not None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_path)
        os.environ.pop("RAY_AUTH_TOKEN", None)
    if is_local:
        # Makes Ray use 127.0.0.1 as this machine's address, so that all its servers listen only there.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def _quietly() -> dict[str, Any]:
    return {"namespace": NAMESPACE, "logging_level": "ERROR", "log_to_driver": False}


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return False
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError:
        return False
    return True


def _temp_root() -> str:
    root = tempfile.gettempdir()
    return root if len(root) <= LONGEST_TEMP_PATH else "/tmp"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
