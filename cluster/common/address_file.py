"""File by which another terminal finds a running cluster: one for each cluster, readable by its owner alone."""

import json
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ...workers.common.errors import ConfigError, Unavailable

START_FIELD = 19  # `starttime` in /proc/<pid>/stat (man proc), counted from what follows the name


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    name: str
    ray_address: str
    token_path: str | None
    is_local: bool
    pid: int  # of `diptych serve`
    started: float  # its start, by `start_of`: a process number may be used again
    node: str = ""  # its machine's name: several machines may share the folder


def home() -> Path:
    """DIPTYCH_HOME, or ~/.diptych."""
    return Path(os.environ.get("DIPTYCH_HOME") or Path.home() / ".diptych")


def token_path(name: str) -> Path:
    return home() / f"{name}.token"


def write(address: ClusterAddress) -> None:
    path = _path(address.name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = _part(address.name)
    with os.fdopen(os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
        json.dump(asdict(address), file)
    part.replace(path)


def read(name: str) -> ClusterAddress | None:
    """None where no cluster of that name was started from here. Raises ConfigError for a file that is damaged."""
    path = _path(name)
    try:
        return _read(path)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{path} is damaged: delete it, and start the cluster again") from e


def names() -> list[str]:
    """Names of the clusters that were started from here and whose `diptych serve` still runs. Files of another kind
    may lie beside theirs."""
    found: list[ClusterAddress] = []
    for path in sorted(home().glob("*.json")):
        with suppress(ValueError, TypeError):
            if address := _read(path):
                found.append(address)
    return [address.name for address in found if serving_process(address)]


def no_cluster(name: str, where: str, running: Collection[str]) -> Unavailable:
    """`where`: "here", or on which Ray; `running`: the clusters that are there."""
    if running:
        return Unavailable(f"no cluster named {name!r} runs {where}. Those that run: {', '.join(running)}; say --name")
    return Unavailable(f"no cluster named {name!r} runs {where}: start one with `diptych serve`")


def remove(name: str) -> None:
    """Also what a `write` that was interrupted left."""
    for path in (_path(name), _part(name), token_path(name)):
        path.unlink(missing_ok=True)


def serving_process(address: ClusterAddress) -> psutil.Process | None:
    """The `diptych serve` that wrote it, if it still runs."""
    try:
        process = psutil.Process(address.pid)
        is_it = start_of(process) == address.started and process.status() != psutil.STATUS_ZOMBIE
        return process if is_it else None
    except psutil.NoSuchProcess:
        return None


def start_of(process: psutil.Process) -> float:
    """Returns when a process started, in clock ticks since the boot. Setting the clock does not change it, as it does
    psutil's seconds since the epoch, which are returned where there is no /proc. Raises psutil.NoSuchProcess."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return process.create_time()
    return float(fields.rpartition(")")[2].split()[START_FIELD])


def _read(path: Path) -> ClusterAddress | None:
    """Raises ValueError or TypeError for a file that is damaged."""
    try:
        return ClusterAddress(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def _path(name: str) -> Path:
    return home() / f"{name}.json"


def _part(name: str) -> Path:
    return home() / f"{name}.part"
