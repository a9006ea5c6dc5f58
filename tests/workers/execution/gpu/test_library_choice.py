"""Choice between our kernels and a library: the faster one, of those that give the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.paged_batch import PagedBatch
from diptych.workers.execution.common import library_choice
from diptych.workers.execution.common.library_choice import Attend, Others, fastest
from diptych.workers.execution.gpu import prompt_part

from ....support.gpu.serving import GREEDY, generate, late, load

ONES = torch.ones(3, 2)


class Named:
    """A library, as far as its name goes."""

    name = "a library"


LIBRARY: Any = Named()


def chosen(own_s: float, other_s: float, other: Attend, *more: tuple[Any, float, Attend]) -> object:
    each = [own_s, other_s, *(took for _, took, _ in more)]
    times = [took for best in each for took in (9.0, best, best, best)]

    def seconds(attend: Attend, results: list[Tensor]) -> float:
        results.append(attend())
        return times.pop(0)

    others = [(LIBRARY, other), *((library, attend) for library, _, attend in more)]
    return fastest(lambda: ONES, others, 40, seconds)


def test_the_faster_one_attends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert chosen(2e-3, 1e-3, lambda: ONES + 1e-3) is LIBRARY
    assert "by a library: 40 tokens take 1000 us, by our own kernel 2000 us" in caplog.text
    assert chosen(1e-3, 2e-3, lambda: ONES) is None
    assert "by our own kernel: 40 tokens take 1000 us, by a library 2000 us" in caplog.text


def test_the_fastest_of_several_attends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    second: Any = Named()
    second.name = "another"
    assert chosen(3e-3, 2e-3, lambda: ONES, (second, 1e-3, lambda: ONES)) is second
    assert "by another: 40 tokens take 1000 us, by a library 2000 us, by our own kernel 3000 us" in caplog.text
    assert chosen(3e-3, 2e-3, lambda: ONES, (second, 1e-3, lambda: ONES + 1)) is LIBRARY
    assert chosen(2e-3, 1e-3, lambda: ONES + 1, (second, 3e-3, lambda: ONES)) is None


@pytest.mark.parametrize("wrong", [0.1, float("nan")])
def test_one_that_gives_something_else_does_not(wrong: float, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(2e-3, 1e-3, lambda: ONES + wrong) is None
    assert "by a library: its results differ by" in caplog.text


def test_one_that_fails_does_not(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Tensor:
        raise RuntimeError("no kernel image is available")

    assert chosen(2e-3, 1e-3, fail) is None
    assert "by a library: it fails (no kernel image is available)" in caplog.text


class Taking(Named):
    """Gives what it is told, and notes the sizes that it is asked for."""

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

    def timed(own: Attend, others: Others, num_tokens: int, seconds: Any) -> Any:
        results: tuple[list[Tensor], list[Tensor]] = ([], [])
        ((found, other),) = others
        assert all(seconds(attend, into) >= 0 for attend, into in zip((own, other), results, strict=True))
        assert torch.equal(results[0][0], results[1][0]) and num_tokens == 40
        return found

    monkeypatch.setattr(library_choice, "find_library", lambda _: library)
    monkeypatch.setattr(library_choice, "fastest", timed)
    monkeypatch.setattr(prompt_part, "PagedBatch", noting)
    runner = load(latent_of("deepseek-v3") if is_latent else llama, late(), max_batch_tokens=40)
    assert set(given) == {None} and [sizes[0] for sizes in library.asked] == [40]
    given.clear()
    generate(runner, [[1, 2, 3, 4]], [GREEDY])
    assert given and set(given) == {library}
