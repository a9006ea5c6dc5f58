"""`diptych experts`: what has gone to each expert of a running cluster's model, for a placement by load."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ...workers.common.errors import ConfigError
from ..common.config import POOL_NAMES
from ..common.expert_loads import balance, imbalance, save


def experts(
    name: Annotated[str, typer.Option(help="The cluster's name.")] = "default",
    pool: Annotated[str | None, typer.Option(help="Of this pool's workers alone.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the loads here, as expert_placement reads them.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Say how even each placement over so many ranks would be.")] = 1,
    copies: Annotated[int, typer.Option(min=0, help="With as many copies of hot experts, by load.")] = 0,
) -> None:
    """Show how many tokens went to the experts of each layer, since the workers' starts, and save it."""
    if pool is not None and pool not in POOL_NAMES:
        raise ConfigError(f"--pool must be one of {', '.join(POOL_NAMES)}, got {pool!r}")
    from ..placement.remote import connected

    with connected(name) as supervisor:
        counts = supervisor.experts(pool)
    if not counts:
        raise ConfigError("no worker counts tokens per expert: serve a mixture-of-experts model")
    console = Console(highlight=False, width=None if Console().is_terminal else 160)
    table = Table(box=None, pad_edge=False)
    for column in ("layer", "tokens", "experts", "busiest", "busiest by average"):
        table.add_column(column, justify="right")
    for layer, loads in counts.items():
        busiest = max(range(len(loads)), key=loads.__getitem__)
        table.add_row(str(layer), f"{sum(loads):,}", str(len(loads)), str(busiest), f"{imbalance(loads):.2f}")
    console.print(table)
    if ranks > 1:
        for placement, ratio in balance(counts, ranks, copies).items():
            console.print(f"{placement}: the busiest of {ranks} ranks has {ratio:.2f} of an even share")
    if out is not None:
        save(counts, out)
        console.print(f"written to {out}: use it as expert_placement", soft_wrap=True, markup=False)
