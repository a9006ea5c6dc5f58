"""Experts over ranks: what each token gets is what one rank that holds all experts would give it, bit for bit."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diptych.kernels.moe.moe_combine import moe_combine
from diptych.workers.common.errors import RankLost
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.models.layers.dispatch import ExpertRanks
from diptych.workers.models.plan.expert_placement import Placement, by_load, contiguous, round_robin
from diptych.workers.parallel.groups import Alone, GlooGroup, Group

from ...parallel.test_groups import as_ranks

NUM_EXPERTS, HIDDEN, TOP_K = 6, 8, 3
PLACEMENTS = {
    "contiguous": contiguous(NUM_EXPERTS, 3),
    "round robin": round_robin(NUM_EXPERTS, 3),
    "copies": by_load([9, 1, 1, 1, 8, 2], 3, 3),
}


def expert(of: int, rows: Tensor) -> Tensor:
    """Each expert is a different number, so that a row alone has the same bits as among others."""
    return torch.tanh(rows * (of + 1))


def experts_of(placement: Placement, rank: int, rows: Tensor, slots: Tensor) -> Tensor:
    assert bool((slots >= 0).all())
    given = [expert(placement.held[rank][slot], row) for row, slot in zip(rows, slots.tolist(), strict=True)]
    return torch.stack(given) if given else rows


def tokens(seed: int, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights, experts; one choice in eight is of none."""
    generator = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(num, HIDDEN, generator=generator), torch.rand(num, TOP_K, generator=generator)
    chosen = torch.rand(num, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
    return x, weights, chosen.masked_fill(torch.rand(num, TOP_K, generator=generator) < 0.125, -1).int()


def expected_of(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    rows = [expert(max(e, 0), x[i // TOP_K]) for i, e in enumerate(experts.view(-1).tolist())]
    y = torch.stack(rows) if rows else x.new_empty(0, HIDDEN)
    return moe_combine(y, weights, experts, NUM_EXPERTS)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_tokens_of_each_rank(name: str, tmp_path: Path) -> None:
    """5, 0 and 11 of them, and then others."""
    placement = PLACEMENTS[name]

    def work(group: Group) -> None:
        ranks = ExpertRanks(group, placement)
        for i, num in enumerate(([5, 0, 11], [0, 0, 1], [0, 0, 0])):
            given = tokens(10 * i + group.rank, num[group.rank])
            found = ranks.over(*given, lambda rows, slots: experts_of(placement, group.rank, rows, slots))
            assert torch.equal(found, expected_of(*given))

    as_ranks(3, tmp_path / "rendezvous", work)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_tokens_that_all_ranks_have(name: str, tmp_path: Path) -> None:
    """Every choice is computed once."""
    placement, (x, weights, experts) = PLACEMENTS[name], tokens(3, 20)

    def work(group: Group) -> tuple[Tensor, Tensor]:
        slots = ExpertRanks(group, placement).here(experts)
        y = experts_of(placement, group.rank, x.repeat_interleave(TOP_K, 0), slots.view(-1).clamp(min=0).long())
        return slots, group.all_reduce(moe_combine(y, weights, slots, len(placement.held[group.rank])))

    found = as_ranks(3, tmp_path / "rendezvous", work)
    slots = torch.stack([each[0] for each in found if isinstance(each, tuple)])
    assert torch.equal((slots >= 0).sum(dim=0), (experts >= 0).int())
    for each in found:
        assert isinstance(each, tuple)
        torch.testing.assert_close(each[1], expected_of(x, weights, experts))


def test_holders_take_turns_by_row(tmp_path: Path) -> None:
    """Expert 0 is at both ranks, expert 1 at rank 1, expert 2 at rank 0."""
    placement, experts = Placement(3, ((0, 2), (0, 1))), torch.tensor([[0, 1], [2, 0], [0, -1]], dtype=torch.int32)

    def work(group: Group) -> list[list[int]]:
        slots = ExpertRanks(group, placement).here(experts)
        group.all_reduce(torch.ones(1))  # none leaves before all have come
        return slots.tolist()

    found = as_ranks(2, tmp_path / "rendezvous", work)
    assert found == [[[0, -1], [1, -1], [0, -1]], [[-1, 1], [-1, 0], [-1, -1]]]


@settings(max_examples=30)
@given(st.integers(0, 1 << 30), st.integers(0, 12))
def test_alone(seed: int, num: int) -> None:
    placement, given_tokens = contiguous(NUM_EXPERTS, 1), tokens(seed, num)
    ranks = ExpertRanks(Alone(), placement)
    found = ranks.over(*given_tokens, lambda rows, slots: experts_of(placement, 0, rows, slots))
    assert torch.equal(found, expected_of(*given_tokens))
    assert torch.equal(ranks.here(given_tokens[2]), given_tokens[2])


@dataclass(frozen=True)
class Seated:
    """As much of a group as `here` asks for."""

    rank: int
    size: int = 3


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_graph_holds_what_is_computed_here(name: str, rank: int) -> None:
    device, experts = FakeDevice(), tokens(4, 9)[2]
    ranks, slots = ExpertRanks(cast("Group", Seated(rank)), PLACEMENTS[name]), torch.empty_like(experts)
    lane = device.lane("main")
    replay = device.capture(lane, lambda: slots.copy_(ranks.here(experts)))
    for seed in (5, 6):
        experts.copy_(tokens(seed, 9)[2])
        lane.run(replay)
        device.synchronize()
        assert torch.equal(slots, ranks.here(experts))


def test_ranks_of_unlike_placements_are_refused(tmp_path: Path) -> None:
    placements = contiguous(NUM_EXPERTS, 2), round_robin(NUM_EXPERTS, 2)

    def work(group: GlooGroup) -> str:
        with pytest.raises(RankLost) as refused:
            ExpertRanks(group, placements[group.rank]).over(*tokens(group.rank, 9), lambda rows, _: rows)
        group.close()  # who waits for this one loses it
        return refused.value.message

    assert any(
        "experts that this rank does not hold" in str(message) for message in as_ranks(2, tmp_path / "rendezvous", work)
    )
