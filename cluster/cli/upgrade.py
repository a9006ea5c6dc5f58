"""`diptych upgrade`: the workers of a running cluster are replaced, one after another, by ones of other settings, of
another checkpoint of the same kind, or of newer code; without a failed request."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ...workers.common.errors import Unavailable
from ...workers.common.exit_codes import FOUND
from ..common import config_file
from ..common.config import ClusterConfig
from ..common.deployment import Deployment
from ..common.plurals import count
from ..preflight.checks import check_checkpoint, check_drafts, check_kv, check_machines, check_ranks, resolve_paths
from ..upgrade.changes import check_changes, named_alike
from ..upgrade.progress import UpgradePhase, UpgradeStatus

if TYPE_CHECKING:
    from ..placement.supervisor_calls import SupervisorClient

POLL_S = 0.5


def upgrade(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a checkpoint to serve instead, of the same kind.", metavar="[MODEL]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings to change; the others stay as they are.")
    ] = None,
    name: Annotated[str, typer.Option(help="The cluster's name.")] = "default",
    in_place: Annotated[
        bool, typer.Option("--in-place", help="End a worker before another starts, where there is no room for both.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for it; 0: do not wait.")] = 3600.0,
) -> None:
    """Replace all workers, one after another, by ones with these settings; without any: by ones of the code that is
    installed now. A worker of the new ones that fails ends it, and those that were there before come back."""
    from ..placement.remote import connected

    console = Console(file=sys.stdout, soft_wrap=True)
    with connected(name) as supervisor:
        deployment = supervisor.deployment()
        after = _changed(deployment.config, model, config)
        _check(deployment, after)
        supervisor.upgrade(after, in_place=in_place)
        if timeout:
            _follow(supervisor, console, timeout)
            supervisor.restart()  # by the new settings, and of the code that is installed now


def _changed(before: ClusterConfig, model: str | None, path: Path | None) -> ClusterConfig:
    """Return the running settings with others over them."""
    changes = config_file.read_yaml(path)[0] if path else {}
    merged = config_file.merge(before.model_dump(exclude_unset=True), changes)
    merged = config_file.merge(merged, {"model": model})
    return named_alike(before, resolve_paths(config_file.build(merged, source=str(path) if path else None)))


def _check(deployment: Deployment, after: ClusterConfig) -> None:
    """Check what can be told before a worker starts. Raises ConfigError, CheckpointError."""
    from ..upgrade.vocabulary import check_tokenizers

    before = deployment.config
    check_changes(before, after)
    if deployment.is_local:  # else the model is other machines' matter
        check_machines(after)
        check_checkpoint(Path(after.shared.model.model))
        check_ranks(after)
        check_drafts(after)
        check_kv(after)
    check_tokenizers(Path(before.shared.model.model), Path(after.shared.model.model))


def _follow(supervisor: "SupervisorClient", console: Console, timeout_s: float) -> None:
    """Tell how it goes until it is over. Raises Unavailable, and typer.Exit where it is rolled back."""
    deadline, told = time.monotonic() + timeout_s, ""
    number: int | None = None
    while True:
        found = supervisor.status().upgrade
        assert found is not None
        number = found.number if number is None else number
        if found.number != number:
            raise Unavailable("another upgrade has taken the place of this one: see `diptych status`")
        if (line := describe(found)) != told:
            told = line
            console.print(Text(line, style="red" if found.reason else ""))
        if found.phase == UpgradePhase.DONE:
            return
        if found.phase == UpgradePhase.ROLLED_BACK:
            raise typer.Exit(FOUND)
        if time.monotonic() > deadline:
            raise Unavailable(f"the upgrade is not over after {timeout_s:g} s; it goes on: see `diptych status`")
        time.sleep(POLL_S)


def describe(upgrade: UpgradeStatus) -> str:
    """Return a line for a person."""
    workers = f"{upgrade.num_done} of {count(upgrade.num_done + upgrade.num_left, 'worker')}"
    match UpgradePhase(upgrade.phase):
        case UpgradePhase.RUNNING:
            return f"upgrade: {workers} have the new settings"
        case UpgradePhase.ROLLING_BACK:
            back = f"upgrade: rolling back, {workers} have the old settings: {upgrade.reason}"
            return f"{back}; now {upgrade.setback}" if upgrade.setback else back
        case UpgradePhase.DONE:
            return f"upgrade: done, {workers} have the new settings"
        case UpgradePhase.ROLLED_BACK:
            return f"upgrade: rolled back, {workers} have the old settings: {upgrade.reason}"
