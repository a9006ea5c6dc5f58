"""Choice of what adds up the parts of several GPUs: NCCL, or sums in symmetric memory (parallel/symmetric_sums.py).

Made for some sizes of messages, by all ranks together, in graphs where steps are graphs; rank 0's times decide for all.
A sum of random numbers must be what NCCL gives but for rounding, and the same bits on every rank: all go on with it as
if it were one number.
"""

import logging
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...device.device import Device, Lane
from ...device.device_group import DeviceGroup
from ...parallel.symmetric_sums import BUFFER_BYTES, SumMethod, SymmetricSums
from .timed_choice import NUM_RUNS, TOLERANCE, Contest, Work, fastest, made_on, timed_on

RANGES = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, BUFFER_BYTES)  # bytes of the largest message of each
NUM_CALLS = 16  # of a run
NCCL = 0  # place among those that are compared; methods follow

log = logging.getLogger("diptych.worker")


def choose_sums(device: Device, group: DeviceGroup, like: Tensor, max_tokens: int, *, has_graphs: bool) -> None:
    """Choose for messages of like's dtype and number of columns, and up to `max_tokens` rows. like: [N, H]. All ranks
    do it together; nothing else is under way."""
    sums, row_bytes = group.sums, like.shape[1] * like.element_size()
    if sums is None or not sums.takes(like[:1]):
        return
    ranks = _Ranks(device, device.lane("sums"), group, sums, has_graphs)
    chosen = list[tuple[int, SumMethod | None]]()
    for last in RANGES:
        if row_bytes <= last:
            num_tokens = min(last // row_bytes, max_tokens)
            chosen.append((last, ranks.fastest(made_on(ranks.lane, partial(ranks.part, like, num_tokens)))))
            if num_tokens == max_tokens:
                break
    sums.dtype, sums.chosen = like.dtype, chosen


@dataclass(frozen=True, slots=True)
class _Ranks:
    """All ranks, as each of them compares. All do the same, in the same order."""

    device: Device
    lane: Lane
    group: DeviceGroup  # adds up by NCCL, while `sums` has chosen nothing
    sums: SymmetricSums
    has_graphs: bool

    def part(self, like: Tensor, num_tokens: int) -> Tensor:
        """Random numbers, others on each rank, [num_tokens, H]."""
        numbers = torch.Generator(like.device).manual_seed(self.group.rank)
        return torch.randn(num_tokens, like.shape[1], generator=numbers, dtype=like.dtype, device=like.device)

    def fastest(self, part: Tensor) -> SumMethod | None:
        """Return what rank 0 finds to be the fastest of those that all ranks may use; None: NCCL is."""
        methods = [method for method in self.sums.methods if self._is_right(method, part)]
        zeros = torch.zeros_like(part)  # NCCL's sum replaces the part: it stays what it is
        works = [self._repeated(partial(self.group.all_reduce, zeros))]
        works += [self._repeated(partial(self.sums.add, method, zeros)) for method in methods]
        chosen, timed = NCCL, timed_on(self.lane)
        if self.group.rank == 0:
            num_bytes = part.numel() * part.element_size()
            what = f"sums of {num_bytes} bytes of {self.group.size} GPUs, {NUM_CALLS} at a time,"
            contest = Contest(what, "computed", len(part), own="NCCL")
            found = fastest(contest, works[0], list(zip(methods, works[1:], strict=True)), timed)
            chosen = NCCL if found is None else 1 + methods.index(found)
        else:
            for work in works:
                for _ in range(1 + NUM_RUNS):
                    timed(work)
        return (None, *methods)[self._of_rank_0(chosen, part.device)]

    def _is_right(self, method: SumMethod, part: Tensor) -> bool:
        """Return whether it gives the sum, and the same bits on each rank: the same answer on all of them."""
        try:
            [differ, error] = made_on(self.lane, partial(self._compare, method, part)).tolist()
        except RuntimeError as e:
            log.warning("sums of GPUs are not computed by %s: it fails (%s)", method.name, e)
            return False
        error /= self.group.size
        if differ:
            log.warning("sums of GPUs are not computed by %s: they are not the same on all ranks", method.name)
        elif not error <= TOLERANCE:
            log.warning("sums of GPUs are not computed by %s: results differ by %.3g", method.name, error)
        return not differ and error <= TOLERANCE

    def _compare(self, method: SumMethod, part: Tensor) -> Tensor:
        """Device work. Return [2] float32, added up over the ranks: whether bits differ from rank 0's, and the largest
        difference from NCCL's sum, relative to its largest number."""
        due = self.group.all_reduce(part.clone()).float()
        found = self.sums.add(method, part)
        of_rank_0 = found.clone()
        self.group.broadcast(of_rank_0)
        differ = (found.view(torch.uint8) != of_rank_0.view(torch.uint8)).any().float()
        error = (found.float() - due).abs().max() / due.abs().max()
        return self.group.all_reduce(torch.stack((differ, error)))

    def _repeated(self, work: Work) -> Work:
        results = list[Tensor]()

        def repeat() -> None:
            for _ in range(NUM_CALLS):
                results[:] = [work()]

        launch = self.device.capture(self.lane, repeat) if self.has_graphs else repeat

        def run() -> Tensor:
            launch()
            return results[0]

        return run

    def _of_rank_0(self, number: int, device: torch.device) -> int:
        def said() -> Tensor:
            tensor = torch.tensor([number], device=device)
            self.group.broadcast(tensor)
            return tensor

        return int(made_on(self.lane, said).item())
