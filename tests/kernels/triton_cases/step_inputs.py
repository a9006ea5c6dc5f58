"""kernels/elementwise/step_inputs.py: rows that are fed, known and idle; tables that are part of wider ones."""

import torch

from diptych.kernels.elementwise.step_inputs import DecodeRows, step_inputs_triton, step_inputs_twin

from .common import DEVICE, Launch, meta


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_equals_its_twin() -> None:
    tables = torch.arange(5 * 12, dtype=torch.int32, device=DEVICE).view(5, 12).flip(0)[:, 2:9]
    rows = DecodeRows(
        token_ids=ints([7, 8, 9, 10, 11]),
        previous_rows=ints([-1, 2, 0, -1, 1]),
        context_lens=ints([1, 16, 17, 0, 100]),
        block_tables=tables,
        yielded=torch.tensor([1 << 33, 40, 50], device=DEVICE),
    )
    cos_sin = torch.randn(112, 12, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = step_inputs_twin(rows, cos_sin, 16)
    assert expected[0].tolist() == [7, 50, 1 << 33, 10, 40]
    assert expected[2].tolist() == [50 * 16, 38 * 16 + 15, 27 * 16, -1, 8 * 16 + 3]
    for found, wanted in zip(step_inputs_triton(rows, cos_sin, 16), expected, strict=True):
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype


def _rows() -> DecodeRows:
    numbers = [meta(32, dtype=torch.int32) for _ in range(3)]
    return DecodeRows(*numbers, meta(32, 512, dtype=torch.int32), meta(256, dtype=torch.int64))


LAUNCHES = [Launch("d 128", lambda: step_inputs_triton(_rows(), meta(8192, 128, dtype=torch.float32), 16))]
