"""What a wrapper allocates is NaN until the kernel has written it (whole numbers: far off)."""

import pytest
import torch
import triton  # noqa: F401 (imported before any kernel: see kernels/common/lang.py)


def index_sum(item: pytest.Function) -> int:
    """Sum of the indices of a case's values; 0 of a test in which fewer than two things vary."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    firsts = [each.split(",")[0] if isinstance(each, str) else each[0] for each in names]
    return sum(item.callspec.indices[first] for first in firsts) if len(firsts) > 1 else 0


def pytest_itemcollected(item: pytest.Item) -> None:
    """Where two things or more vary, half of the cases are long: each value stays in the other half."""
    if isinstance(item, pytest.Function) and index_sum(item) % 2:
        item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)  # type: ignore[arg-type]
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 99)

    monkeypatch.setattr(torch, "empty", poisoned)
