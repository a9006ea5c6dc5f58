"""Rows that workers exchange on devices: each gets what its own rows' experts give, whatever the others have."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diptych.kernels.moe.moe_combine import moe_combine
from diptych.workers.common.errors import PeerLost
from diptych.workers.device.device_group import FakeGroup
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.models.layers import row_exchange
from diptych.workers.models.layers.dispatch import ExpertRanks
from diptych.workers.models.layers.row_exchange import RowExchange
from diptych.workers.models.layers.turns import finished
from diptych.workers.models.plan.expert_placement import Placement
from diptych.workers.parallel.groups import GlooGroup

from ...parallel.test_groups import as_ranks
from .test_dispatch import HIDDEN, PLACEMENTS, TOP_K, expected_of, expert, tokens


def mixed(ranks: ExpertRanks, held: Sequence[int], given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """As moe_gathered does, with experts of which each is another number. held: those of this worker."""
    exchange = ranks.exchange
    assert exchange is not None
    parts: list[Tensor] = []
    for start, end in exchange.pieces(len(given[0])):
        own = [of[start:end] for of in given]
        rows, gates, experts = finished(exchange.gather(*own, end - start))
        assert len(rows) == exchange.size * (end - start) and rows.stride(1) == 1
        slots = ranks.here(experts)
        every = torch.stack([expert(of, rows.repeat_interleave(TOP_K, 0)) for of in held])
        y = every[slots.view(-1).clamp(min=0).long(), torch.arange(slots.numel())]
        parts.append(finished(exchange.scatter(moe_combine(y, gates, slots, len(held)), len(own[0]))))
    return torch.cat(parts)


def experts_of(exchange: RowExchange, placement: Placement) -> tuple[ExpertRanks, Sequence[int]]:
    """Return the experts of one worker, and which they are."""
    return ExpertRanks(exchange, placement, is_over=True), placement.held[exchange.rank]


@pytest.mark.parametrize("most", [8192, 9])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_rows_of_each_worker(name: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the largest has, in one piece and in several; some workers have none. A NaN stays in its row."""
    monkeypatch.setattr(row_exchange, "MOST_ROWS", most)

    def work(group: GlooGroup) -> None:
        exchange = RowExchange(group.rank, group.size)
        exchange.join(FakeGroup(group))
        ranks, held = experts_of(exchange, PLACEMENTS[name])
        for i, num in enumerate(([5, 0, 11], [0, 0, 1], [7, 7, 7])):
            given = tokens(10 * i + group.rank, num[group.rank])
            expected = expected_of(*given)
            if group.rank == 2:
                given[0][-1], expected[-1] = torch.nan, torch.nan
                given[2][-1], given[1][-1] = 0, torch.nan
            exchange.agree(max(num) if len({*num}) > 1 else None)
            torch.testing.assert_close(mixed(ranks, held, given), expected, equal_nan=True)

    as_ranks(3, tmp_path / "rendezvous", work)


def test_a_graph_exchanges_what_is_there_when_it_is_replayed(tmp_path: Path) -> None:
    """Also of a dtype that gloo does not know, whose rows are no multiple of what kernels are compiled for."""
    placement = PLACEMENTS["round robin"]

    def work(group: GlooGroup) -> None:
        device, exchange = FakeDevice(), RowExchange(group.rank, group.size)
        exchange.join(FakeGroup(group))
        ranks, held = experts_of(exchange, placement)
        own = tokens(group.rank, 4)
        buffers = own[0].bfloat16(), own[1], own[2]
        found = torch.empty(4, HIDDEN, dtype=torch.bfloat16)
        replay = device.capture(device.lane("main"), lambda: found.copy_(mixed(ranks, held, buffers)))
        for seed in (20, 30):
            given = tokens(seed + group.rank, 4)
            for buffer, of in zip(buffers, given, strict=True):
                buffer.copy_(of)
            with torch.inference_mode():
                replay()
            expected = expected_of(given[0].bfloat16(), *given[1:])
            torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)

    as_ranks(3, tmp_path / "rendezvous", work)


def test_until_they_join_the_others_have_no_rows() -> None:
    """What is computed for rows of this worker alone, in shapes of all."""
    placement = PLACEMENTS["contiguous"]
    x, gates, experts = tokens(3, 6)
    held = placement.held[1]
    here = torch.where((experts >= held[0]) & (experts <= held[-1]), experts, -1).int()
    found = mixed(*experts_of(RowExchange(1, 3), placement), (x, gates, experts))
    torch.testing.assert_close(found, expected_of(x, gates, here))


@pytest.mark.parametrize("of", ["gather", "scatter"])
def test_a_worker_that_is_gone_is_lost(of: str, tmp_path: Path) -> None:

    def work(group: GlooGroup) -> None:
        exchange = RowExchange(group.rank, group.size)
        exchange.join(FakeGroup(group))
        group.all_reduce(torch.ones(1))
        if group.rank == 1:
            group.close()
            return
        calls: dict[str, Callable[[], object]] = {
            "gather": lambda: finished(exchange.gather(*tokens(1, 2), 2)),
            "scatter": lambda: finished(exchange.scatter(torch.ones(2 * group.size, HIDDEN), 2)),
        }
        with pytest.raises(PeerLost, match="lost another rank"):
            calls[of]()

    as_ranks(2, tmp_path / "rendezvous", work)
