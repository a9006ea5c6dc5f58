import pytest
import torch

from diptych.kernels.sampling.logits_processors import (
    IN_PROMPT,
    LogitsProcessors,
    count_tokens_triton,
    count_tokens_twin,
    process_logits_triton,
    process_logits_twin,
)

from .common import DEVICE, Launch, meta, normal

I32, F32, F64, I64 = torch.int32, torch.float32, torch.float64, torch.int64


def launch() -> None:
    floats = [meta(8, dtype=dtype) for dtype in (F32, F64, F64)]
    masks, counts = meta(3, 4096, dtype=I32), meta(4, 131072, dtype=I32)
    rows = meta(8, dtype=I32)
    biases = meta(9, dtype=I32), meta(512, dtype=I32), meta(512, dtype=F32)
    process_logits_triton(meta(8, 131072, dtype=F32), LogitsProcessors(*biases, rows, masks, rows, counts, *floats))
    for amount in (1, IN_PROMPT):
        count_tokens_triton(counts, rows, meta(8, dtype=I64), amount)


LAUNCHES = [Launch("128k", launch)]


def counted(vocab_size: int) -> list[torch.Tensor]:
    """By the twin and by Triton: two rows of prompts and outputs, some tokens in both and some many times."""
    generator = torch.Generator().manual_seed(vocab_size)
    found: list[torch.Tensor] = []
    ids = torch.randint(vocab_size, (2, 90), generator=generator).to(DEVICE)
    rows = torch.randint(-1, 2, (90,), generator=generator).to(DEVICE, I32)
    for run in (count_tokens_twin, count_tokens_triton):
        counts = torch.zeros(2, vocab_size, dtype=I32, device=DEVICE)
        run(counts, rows, ids[0], IN_PROMPT)
        run(counts, rows, ids[0] // 2, IN_PROMPT)
        run(counts, rows, ids[1] // 3)
        found.append(counts)
    return found


def processors(vocab_size: int, num_rows: int) -> LogitsProcessors:
    generator = torch.Generator().manual_seed(1)
    lengths = [(0, min(vocab_size, 7), min(vocab_size, 300))[row % 3] for row in range(num_rows)]
    bias_ids = torch.cat([torch.randperm(vocab_size, generator=generator)[:num] for num in lengths])
    biases = normal(len(bias_ids), dtype=F32) * 3
    biases[::7] = -torch.inf
    masks = torch.randint(-(1 << 31), 1 << 31, (2, -(-vocab_size // 32)), generator=generator)
    return LogitsProcessors(
        torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=I32),
        bias_ids.to(DEVICE, I32),
        biases,
        (torch.arange(num_rows, device=DEVICE, dtype=I32) % 3) - 1,
        masks.to(DEVICE, I32),
        (torch.arange(num_rows, device=DEVICE, dtype=I32) // 2 % 3) - 1,
        counted(vocab_size)[0],
        torch.rand(num_rows, generator=generator).to(DEVICE) * 2 + 0.3,
        torch.rand(num_rows, generator=generator).to(DEVICE, F64) * 4 - 2,
        torch.rand(num_rows, generator=generator).to(DEVICE, F64) * 4 - 2,
    )


@pytest.mark.parametrize("vocab_size", [5, 67, 4500])
def test_change_logits(vocab_size: int) -> None:
    both = [normal(9, vocab_size + 3, dtype=F32)[:, 3:] for _ in range(2)]
    before, given = both[0].clone(), processors(vocab_size, 9)
    for run, logits in zip((process_logits_twin, process_logits_triton), both, strict=True):
        run(logits, given)
    # A double-precision product and sum may be one instruction.
    torch.testing.assert_close(both[1], both[0], rtol=0.0 if DEVICE == "cpu" else 1e-6, atol=0.0)
    assert (both[0] != before).float().mean() > 0.3


@pytest.mark.parametrize("vocab_size", [5, 67])
def test_count_tokens(vocab_size: int) -> None:
    expected, found = counted(vocab_size)
    assert torch.equal(found, expected) and (expected & IN_PROMPT).any() and (expected & 1).any()
