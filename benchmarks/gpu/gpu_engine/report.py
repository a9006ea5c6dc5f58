"""Report of the measurements, with the limit that each figure is a share of."""

from dataclasses import asdict, dataclass
from typing import Any

HEAD = "| model | graphs | what | of | value | unit | share | of what |\n|---|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Figure:
    what: str
    case: str
    value: float
    unit: str
    share: float | None = None
    of_what: str = ""
    model: str = ""
    graphs: bool | None = None  # None: it makes no difference

    def line(self) -> str:
        graphs = "" if self.graphs is None else "yes" if self.graphs else "no"
        share = "" if self.share is None else f"{self.share:.1%}"
        cells = (self.model, graphs, self.what, self.case, f"{self.value:.4g}", self.unit, share, self.of_what)
        return f"| {' | '.join(cells)} |"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
