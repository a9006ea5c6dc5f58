"""Experts that are spread over ranks: the rows of a step go to where their experts are, and what those give comes back.

Where every rank has tokens of its own (data-parallel attention), each sends a row to the holder of each expert that it
goes to, and adds up what comes back, in the order in which the experts were chosen:

    rows, by rank -> all_to_all -> experts held here -> all_to_all -> the rows' own order -> sum

A rank sends at most top_k H numbers a token of its own, and gets as many back; how much it receives for its experts is
for the others' routers to say.

Where all ranks have the same tokens (tensor-parallel attention) nothing need be sent there: each computes what its own
experts give, `here`, and an all_reduce adds that up, of 2 H numbers a token (n - 1) / n, as it does after a dense MLP.
To send each rank's part of the tokens to their experts and back and then to everybody would be 2 top_k H / n + H: more,
unless there are more than 2 top_k ranks.

On devices workers with tokens of their own gather those of all first (row_exchange.py), and then do as with these.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ....kernels.moe.moe_combine import moe_combine
from ...common.errors import RankLost
from ...parallel.groups import Group
from ..plan.expert_placement import Placement
from .row_exchange import RowExchange

EXPERT_BYTES = 8  # of the count of one
Compute = Callable[[Tensor, Tensor], Tensor]  # rows [N, H], slot of each [N] int64 -> what those experts give [N, H]


class ExpertRanks:
    """Experts of one rank, which holds `placement.held[group.rank]`. All ranks call the same, in the same order."""

    def __init__(
        self,
        group: Group | RowExchange,
        placement: Placement,
        device: torch.device | None = None,
        *,
        is_over: bool = False,
    ) -> None:
        """device: of the tokens; None: the CPU. is_over: each rank has tokens of its own, which a RowExchange
        gathers."""
        assert placement.num_ranks == group.size
        self.is_over = is_over
        self.exchange = group if isinstance(group, RowExchange) else None
        self._group, self._num_experts = group, placement.num_experts
        holders = placement.holders()
        most = max(map(len, holders))
        self._holders = torch.tensor([(ranks * most)[:most] for ranks in holders], device=device)
        self._num_holders = torch.tensor([len(ranks) for ranks in holders], device=device)
        self._slots = torch.tensor(placement.slots(group.rank), device=device)

    def here(self, experts: Tensor) -> Tensor:
        """experts: [T, top_k] int32 of tokens that all ranks have; -1 is none. Returns the slots of those that this
        rank computes, [T, top_k] int32; -1 elsewhere: each is computed by one rank. A graph may hold it."""
        is_ours = self._ranks_of(experts, first_row=0) == self._group.rank
        return torch.where(is_ours, self._slots[experts.long()], -1).int()

    def over(
        self, x: Tensor, weights: Tensor, experts: Tensor, compute: Compute, shared: Tensor | None = None
    ) -> Tensor:
        """Compute tokens that this rank alone has: x [T, H]; weights [T, top_k] float32; experts [T, top_k] int32, -1
        is none; shared: [T, H], is added. T may differ from rank to rank, and be 0. Returns [T, H]."""
        group, top_k = self._group, experts.shape[1]
        assert not isinstance(group, RowExchange)
        ranks = self._ranks_of(experts, first_row=group.rank).view(-1)
        places = ranks.argsort(stable=True)[int((ranks < 0).sum()) :]
        counts = torch.bincount(ranks[places], minlength=group.size)
        ones = [1] * group.size
        from_counts: list[int] = group.all_to_all(counts, ones, ones).tolist()
        if min(from_counts) < 0:
            raise RankLost(f"a rank announces {min(from_counts)} rows: ranks do not compute the same step")
        to_counts = counts.tolist()
        sent = _joined(x[places // top_k], experts.view(-1)[places].long())
        rows, theirs = _parted(group.all_to_all(sent, to_counts, from_counts), x)
        given = group.all_to_all(compute(rows, self._slots_of(theirs)), from_counts, to_counts)
        y = x.new_empty(experts.numel(), x.shape[1])
        y[places] = given
        return moe_combine(y, weights, experts, self._num_experts, shared=shared)

    def _slots_of(self, experts: Tensor) -> Tensor:
        """experts: [N] int64, as received. Returns their slots here, [N] int64. Raises RankLost."""
        slots = self._slots[experts.clamp(0, self._num_experts - 1)]
        if ((experts < 0) | (experts >= self._num_experts) | (slots < 0)).any():
            raise RankLost(
                "a rank sent rows for experts that this rank does not hold: ranks do not have the same placement"
            )
        return slots

    def _ranks_of(self, experts: Tensor, first_row: int) -> Tensor:
        """Return the rank that computes each choice, [T, top_k] int64; -1 for none. Its holders take turns by row."""
        chosen = experts.long().clamp(min=0)
        rows = torch.arange(first_row, first_row + len(experts), device=experts.device)
        turn = rows[:, None] % self._num_holders[chosen]
        return self._holders[chosen, turn].masked_fill(experts < 0, -1)


def _joined(rows: Tensor, experts: Tensor) -> Tensor:
    """rows: [N, H]; experts: [N] int64. Returns [N, bytes]: a message costs more than what is in it."""
    return torch.cat((rows.view(torch.uint8), experts[:, None].view(torch.uint8)), dim=1)


def _parted(joined: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """rows and experts again, the rows of like's dtype."""
    rows, experts = joined[:, :-EXPERT_BYTES], joined[:, -EXPERT_BYTES:]
    return rows.contiguous().view(like.dtype), experts.contiguous().view(torch.int64).view(-1)
