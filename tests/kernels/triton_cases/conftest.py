"""What a wrapper allocates is NaN until the kernel has written it (whole numbers: far off)."""

import pytest
import torch
import triton  # noqa: F401 (imported before any kernel: see kernels/lang.py)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)  # type: ignore[arg-type]
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 99)

    monkeypatch.setattr(torch, "empty", poisoned)
