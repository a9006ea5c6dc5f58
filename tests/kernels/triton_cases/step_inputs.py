"""kernels/elementwise/step_inputs.py: rows that are fed, known and idle; tables that are part of wider ones."""

from dataclasses import replace

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
    assert expected[3] is None
    check(rows, cos_sin)
    with_tail = replace(rows, tails=ints([3, 4, 5, 6, 7]))
    expected = step_inputs_twin(with_tail, cos_sin, 16)
    assert expected[2].tolist() == [3 * 16, 4 * 16 + 15, 5 * 16, -1, 7 * 16 + 3]
    assert expected[3] is not None and expected[3].tolist() == [[-1, -1], [4, 38], [-1, -1], [-1, -1], [-1, -1]]
    check(with_tail, cos_sin)


def check(rows: DecodeRows, cos_sin: torch.Tensor) -> None:
    for found, wanted in zip(step_inputs_triton(rows, cos_sin, 16), step_inputs_twin(rows, cos_sin, 16), strict=True):
        assert (found is wanted is None) or (torch.equal(found, wanted) and found.dtype == wanted.dtype)


def launch(tails: torch.Tensor | None = None) -> None:
    numbers = [meta(32, dtype=torch.int32) for _ in range(3)]
    rows = DecodeRows(*numbers, meta(32, 512, dtype=torch.int32), meta(256, dtype=torch.int64), tails)
    step_inputs_triton(rows, meta(8192, 128, dtype=torch.float32), 16)


LAUNCHES = [
    Launch("d 128", launch),
    Launch("d 128, with a KV tail", lambda: launch(meta(32, dtype=torch.int32)), is_gated=False),
]
