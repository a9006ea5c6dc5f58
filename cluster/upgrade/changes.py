"""Checks that an upgrade changes settings of workers alone. Pure: two ClusterConfigs in, an error out.

The name that clients call the model by stays. What routers, the supervisor and the sizes of pools depend on stays, too:
these need a restart, or `diptych scale`.
"""

from ...workers.common.errors import ConfigError
from ...workers.config.worker_config import SETTINGS
from ..common.config import ClusterConfig

SIZES = ("replicas", "min_replicas", "max_replicas", "scale_to_zero_after_s")
OF_GANGS = ("data_parallel",)


def named_alike(before: ClusterConfig, after: ClusterConfig) -> ClusterConfig:
    """Return settings `after`, under the model's name before where they name none."""
    if after.shared.model.served_model_name is not None:
        return after
    return after.model_copy(update={"served_model_name": before.shared.model.name})


def check_changes(before: ClusterConfig, after: ClusterConfig) -> None:
    """Raise ConfigError where they differ in what an upgrade does not change, naming each."""
    faults = [
        name
        for name in ClusterConfig.model_fields
        if name not in SETTINGS and name != "pools" and getattr(before, name) != getattr(after, name)
    ]
    for pool, settings in before.pools.items():
        other = after.pools.get(pool)
        for name in (*SIZES, *OF_GANGS):
            if getattr(settings, name) != getattr(other, name):
                faults.append(f"pools.{pool}.{name}")
    if before.shared.telemetry != after.shared.telemetry:
        faults.append("settings of traces and logs")
    if faults:
        raise ConfigError(
            f"an upgrade changes the settings of workers, and not {', '.join(faults)}: leave that out, and use "
            "`diptych scale` for the size of a pool, or start the cluster again"
        )
    if (old := before.shared.model.name) != (new := after.shared.model.name):
        raise ConfigError(
            f"clients call the model {old!r}, and would not find it as {new!r}: leave served_model_name out"
        )
