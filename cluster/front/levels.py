"""Chooses the service level of a request: each of its values is the first that is given of

what the call asks for itself      its tier      its model name      the cluster (None here: workers know it)
"""

from dataclasses import dataclass, replace

from ...workers.common.errors import InvalidRequest
from ...workers.common.request import RequestLevel
from ..common.config import USUAL_TIERS, Admission, NamedLevel, ServiceLevel

DEFAULT_TIER = "default"
MAX_SHOWN_CHARS = 40  # of a client's value in an error
_UNNAMED = NamedLevel()


@dataclass(frozen=True, slots=True)
class AskedLevel:
    """Level that a call asks for. None: not given."""

    tier: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    admission: Admission | None = None


NO_LEVEL = AskedLevel()


def bound(asked: AskedLevel, tier: str | None) -> AskedLevel:
    """Level with the tier of an API key; None: the key has none. Raises InvalidRequest where it asks for another."""
    if tier is None:
        return asked
    if asked.tier is not None and asked.tier not in USUAL_TIERS and asked.tier != tier:
        raise InvalidRequest(
            f"service_tier {asked.tier[:MAX_SHOWN_CHARS]!r} is not open to this API key: send {tier!r}, or leave it "
            "out",
            param="service_tier",
        )
    return replace(asked, tier=tier)


class ServiceLevels:
    """Levels of a cluster: of its tiers, and of the names that its model is served by."""

    def __init__(self, cluster: ServiceLevel | None = None, models: dict[str, NamedLevel] | None = None) -> None:
        self._cluster = cluster or ServiceLevel()
        self.models = models or {}
        self._known: dict[tuple[str, str], RequestLevel] = {}  # by model name and tier

    def of(self, model: str, asked: AskedLevel) -> RequestLevel:
        """Level of a request to `model`, one of the served names. Raises InvalidRequest for an unknown tier and for
        impossible times."""
        tier = DEFAULT_TIER if asked.tier is None or asked.tier in USUAL_TIERS else asked.tier
        named = self._known.get((model, tier)) or self._add(model, tier)
        if asked.ttft_s is asked.tpot_s is asked.admission is None:
            return named
        level = replace(
            named,
            ttft_s=named.ttft_s if asked.ttft_s is None else asked.ttft_s,
            tpot_s=named.tpot_s if asked.tpot_s is None else asked.tpot_s,
            refuse=named.refuse if asked.admission is None else asked.admission == "refuse",
        )
        level.validate()
        return level

    def _add(self, model: str, tier: str) -> RequestLevel:
        cluster = self._cluster
        if tier != DEFAULT_TIER and tier not in cluster.tiers:
            raise InvalidRequest(
                f"service_tier {tier[:MAX_SHOWN_CHARS]!r} is not served here: send "
                f"{' or '.join(['auto', DEFAULT_TIER, *cluster.tiers])}",
                param="service_tier",
            )
        named = (cluster.tiers.get(tier, _UNNAMED), self.models.get(model, _UNNAMED))
        level = RequestLevel(
            ttft_s=next((each.ttft_s for each in named if each.ttft_s is not None), None),
            tpot_s=next((each.tpot_s for each in named if each.tpot_s is not None), None),
            refuse=next((each.admission for each in named if each.admission), cluster.admission) == "refuse",
            model=model,
            tier=tier,
        )
        self._known[model, tier] = level
        return level
