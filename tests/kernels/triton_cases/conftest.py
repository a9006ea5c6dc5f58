"""What a wrapper allocates is NaN until the kernel has written it (whole numbers: far off).

DIPTYCH_SHARE: "1/2" is the second half of the cases, for processes that share them.
"""

import os

import pytest
import torch
import triton  # noqa: F401 (imported before any kernel: see kernels/common/lang.py)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    number, num = (int(part) for part in os.environ.get("DIPTYCH_SHARE", "0/1").split("/"))
    items[:] = items[number::num]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)  # type: ignore[arg-type]
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 99)

    monkeypatch.setattr(torch, "empty", poisoned)
