"""Keeps the generations of a cluster's settings, and its upgrade while one runs. Knows no Ray: the plan of control/
replaces workers whose generation is not the wanted one, the supervisor says what becomes of them."""

import logging
import time
from collections.abc import Collection, Iterable, Mapping

from ...workers.common.errors import DiptychError, Unavailable
from ...workers.common.tls import LinkTls
from ..common.config import ClusterConfig
from ..common.handles import Launcher, SettingsGeneration, WorkerStarted
from ..routing.fleet import WorkerInfo
from .changes import check_changes, named_alike
from .progress import Upgrade, UpgradePhase, UpgradeStatus, from_json, to_json
from .trial import try_worker

log = logging.getLogger("diptych.supervisor")


class UpgradeKeeper:
    """State of one supervisor, or of the one before it, which `launcher` has kept. `config`: of the cluster's start;
    `token`: what workers ask of those who call them."""

    def __init__(self, config: ClusterConfig, launcher: Launcher, token: str | None, tls: LinkTls | None) -> None:
        self._launcher, self._token, self._tls = launcher, token, tls
        self._generations = {0: config}
        self._upgrade: Upgrade | None = None
        if kept := launcher.recall_upgrade():
            self._generations, self._upgrade = from_json(kept)
            self._use_settled()
        self._began_at = time.monotonic()

    @property
    def wanted(self) -> SettingsGeneration:
        """Settings of the workers that start."""
        number = self._upgrade.wanted if self._upgrade else 0
        return SettingsGeneration(number, self._generations[number])

    @property
    def is_running(self) -> bool:
        """Return whether workers are replaced, forwards or back."""
        return self._upgrade is not None and not self._upgrade.is_over

    @property
    def in_place(self) -> bool:
        return self._upgrade is not None and self._upgrade.in_place

    @property
    def lacked(self) -> Mapping[str, int]:
        """Workers of each pool that had no place when the upgrade began, and start after it."""
        return self._upgrade.lacked if self._upgrade else {}

    def is_outdated(self, generation: int) -> bool:
        return generation != self.wanted.number

    def tries(self, worker: WorkerStarted | None) -> bool:
        """Return whether the worker needs a trial before it serves: while an upgrade goes on, forwards or back, each
        with the wanted settings that passed none; whichever supervisor started it. None: it has not started."""
        upgrade = self._upgrade
        if worker is None or upgrade is None or upgrade.is_over:
            return False
        return worker.generation == upgrade.wanted and worker.incarnation not in upgrade.tried

    async def admit(self, worker: WorkerStarted, serving: Iterable[WorkerInfo]) -> None:
        """Put a worker to its trial where it needs one, and note that it may serve. `serving`: those that serve, whose
        model and weights count. Raises what ends the upgrade."""
        if self.tries(worker):
            await try_worker(worker, serving, self._token, self._tls)
        if self._upgrade and not self._upgrade.is_over:
            self._note(self._upgrade.passed(worker.incarnation))

    def begin(
        self, config: ClusterConfig, lacked: Mapping[str, int], *, in_place: bool, serving: Iterable[str]
    ) -> None:
        """Want all workers to have these settings, also in the place of an upgrade that is rolled back. `lacked`:
        workers of each pool that have no place; `serving`: incarnations of those that serve. Raises ConfigError, and
        Unavailable while an upgrade runs."""
        if self._upgrade and self._upgrade.phase is UpgradePhase.RUNNING:
            raise Unavailable("an upgrade runs: see `diptych status`, and try again when it is over")
        before = self.wanted
        config = named_alike(before.config, config)
        check_changes(before.config, config)
        number = max(self._generations) + 1
        self._generations = {before.number: before.config, number: config}
        self._began_at = time.monotonic()
        self._note(Upgrade(number, before.number, in_place=in_place, tried=tuple(serving), lacked=dict(lacked)))

    def failed(self, worker_id: str, generation: int, error: DiptychError, lacked: Mapping[str, int]) -> bool:
        """Note that a worker was lost that had not served for long. `lacked`: workers of each pool that have no place.
        Return whether the upgrade is rolled back now."""
        before = self._upgrade
        if before is None or generation != before.wanted:
            return False
        self._note(before.failed(worker_id, error, lacked))
        return self.wanted.number == before.other

    def look(self, generations: Collection[int]) -> None:
        """Take the generations of all workers, those that start or leave included, once every pool is whole."""
        if self._upgrade and not self._upgrade.is_over and set(generations) <= {self._upgrade.wanted}:
            log.info("the upgrade took %.1f s", time.monotonic() - self._began_at)
            self._note(self._upgrade.finished())

    def status(self, generations: Collection[int]) -> UpgradeStatus | None:
        """Return the last upgrade as a person sees it. `generations`: of the workers that serve, or serve to their
        end."""
        if (upgrade := self._upgrade) is None:
            return None
        num_done = sum(each == upgrade.wanted for each in generations)
        return UpgradeStatus(
            upgrade.phase.value,
            upgrade.wanted,
            num_done,
            len(generations) - num_done,
            upgrade.reason,
            upgrade.setback,
            upgrade.number,
        )

    def _note(self, upgrade: Upgrade) -> None:
        if upgrade == self._upgrade:
            return
        if self._upgrade is None or upgrade.phase is not self._upgrade.phase or upgrade.wanted != self._upgrade.wanted:
            log.info("upgrade to generation %d: %s %s", upgrade.wanted, upgrade.phase.value, upgrade.reason)
        self._upgrade = upgrade
        self._use_settled()
        self._launcher.keep_upgrade(to_json(self._generations, upgrade))

    def _use_settled(self) -> None:
        """Routers that start get the settings by which all workers run; until then, those from before."""
        upgrade = self._upgrade
        assert upgrade is not None
        is_forward = upgrade.phase is UpgradePhase.RUNNING
        number = upgrade.other if is_forward else upgrade.wanted
        self._launcher.use(SettingsGeneration(number, self._generations[number]))
