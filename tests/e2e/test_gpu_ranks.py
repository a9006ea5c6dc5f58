"""Workers whose ranks have a device each: real processes, fake devices."""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest
import torch

from ..checkpoints import make_checkpoint, untied_prompts
from ..workers.gpu.serving import GREEDY, generate, load
from .harness import WorkerHandle, unlike_workers
from .test_tensor_parallel import (
    FLAGS,
    NUM_TOKENS,
    Cases,
    answer,
    assert_ended,
    assert_kv_moves,
    info,
    ranks_of,
    routed,
)

END_S = 20.0  # for a process that must end; generous, and no test passes by waiting
ON_DEVICES = {"device": "fake", "tensor_parallel": 2, "max_running": 8}

pytestmark = pytest.mark.e2e


def test_kv_moves_to_and_from_ranks_on_devices_and_one_that_is_killed_ends_all(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "gemma4", "gemma4", seed=6)
    cases = untied_prompts(path, seed=31, lengths=(1, 17, 130), max_tokens=NUM_TOKENS)
    with unlike_workers(path, [("mixed", FLAGS | ON_DEVICES), ("mixed", FLAGS)]) as [devices, one]:
        assert_kv_moves(devices, one, cases, "grpc")
        assert_kv_moves(one, devices, cases, "grpc")
        ranks = ranks_of(devices)
        asyncio.run(killed_midway(devices, one, ranks, cases))
        assert devices.process.wait(END_S) == 1
        assert_ended(ranks)


def test_ranks_on_devices_hold_experts_whole(tmp_path: Path) -> None:
    """5 of them over two; which are one's own is found in the graphs."""
    path = make_checkpoint(tmp_path / "mixtral", "mixtral", 4, num_local_experts=5)
    cases = untied_prompts(path, seed=2, lengths=(5, 40), max_tokens=GREEDY.max_tokens)
    before = torch.get_num_threads()
    runner = load(path, None, device="fake", tensor_parallel=2, expert_parallel=2, max_running=2)
    try:
        run = generate(runner, [prompt for prompt, _ in cases], [GREEDY] * 2)
        assert run.token_ids == [tokens for _, tokens in cases]
    finally:
        runner.close()
        torch.set_num_threads(before)


async def killed_midway(devices: WorkerHandle, other: WorkerHandle, ranks: list[psutil.Process], cases: Cases) -> None:
    """A request goes on elsewhere."""
    prompt, tokens = cases[-1]
    async with routed(devices) as router:
        num_out = 0

        def count() -> None:
            nonlocal num_out
            num_out += 1
            if num_out == NUM_TOKENS // 3:
                router.update_fleet([info(devices), info(other)])
                ranks[0].send_signal(signal.SIGKILL)

        assert await answer(router, prompt, b"killed", count) == tokens
