"""Choice of what attends for prompts: what is compared, and who gets what was chosen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.paged_batch import PagedBatch
from diptych.workers.execution.common import library_choice
from diptych.workers.execution.common.library_choice import Others
from diptych.workers.execution.common.timed_choice import Contest, Timed, Work
from diptych.workers.execution.gpu import prompt_part

from ....support.gpu.serving import GREEDY, generate, late, load


class Taking:
    """Attends as our kernels do, and notes the sizes that it is asked for."""

    name = "a library"

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def takes(self, q: Tensor, cache: Tensor, options: object, scales: object) -> bool:
        self.asked.append([*q.shape, *cache.shape])
        return True

    def attend(self, q: Tensor, cache: Tensor, batch: PagedBatch, options: object, out: Tensor, first_seq: int) -> None:
        out.copy_(library_choice.paged_attention(q, cache, batch))

    def takes_latent(self, q: Tensor, values: Tensor) -> bool:
        self.asked.append([*q.shape, *values.shape])
        return True

    def attend_latent(self, *arguments: Any) -> Tensor:
        return library_choice.mla_prefill(*arguments)


@pytest.mark.parametrize("is_latent", [False, True])
def test_prompts_are_given_the_one_that_was_chosen(
    is_latent: bool, llama: Path, latent_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sizes of the first layer, on the device."""
    library, given, batch_of = Taking(), list[object](), prompt_part.PagedBatch

    def noting(*arguments: Any, **named: Any) -> PagedBatch:
        given.append(named["library"])
        return batch_of(*arguments, **named)

    def fastest(contest: Contest, own: Work, others: Others, timed: Timed) -> Any:
        ((found, other),) = others
        results = [timed(work)[1] for work in (own, other)]
        assert torch.equal(*results) and (contest.what, contest.num_tokens) == ("prompts", 39)
        return found

    monkeypatch.setattr(library_choice, "find_library", lambda _: library)
    monkeypatch.setattr(library_choice, "fastest", fastest)
    monkeypatch.setattr(prompt_part, "PagedBatch", noting)
    runner = load(latent_of("deepseek-v3") if is_latent else llama, late(), max_batch_tokens=40)
    assert set(given) == {None} and [sizes[0] for sizes in library.asked] == [39]
    given.clear()
    generate(runner, [[1, 2, 3, 4]], [GREEDY])
    assert given and set(given) == {library}
