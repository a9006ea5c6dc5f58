"""Workers that share experts, each with a device of its own: real processes, fake devices. Tokens are transformers'."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.exit_codes import UNAVAILABLE

from ..support.checkpoints import make_checkpoint, untied_prompts
from ..support.harness import assert_nothing_leaked
from ..workers.execution.gpu.conftest import EVEN
from .test_data_parallel import ask, group, num_decoded, one_dies
from .test_tensor_parallel import END_S, NUM_TOKENS, assert_kv_moves

ON_DEVICES: dict[str, Any] = {"device": "fake", "max_running": 8}

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("arch", ["mixtral", "qwen3moe", "deepseek-v2", "deepseek-v3"])
def test_tokens_of_two_workers(arch: str, tmp_path: Path) -> None:
    """One is idle at first; later one prefills while the other decodes. DeepSeek's have shared experts beside."""
    path = make_checkpoint(tmp_path / arch, arch, seed=8, **(EVEN if "deepseek" in arch else {}))
    cases = untied_prompts(path, seed=33, lengths=(1, 40, 130), max_tokens=NUM_TOKENS)
    with group(path, [{}, {}], **ON_DEVICES) as (alone, [first, second]):
        asyncio.run(ask([first], cases, b"one"))
        assert num_decoded(first) > 0 and num_decoded(second) == 0
        asyncio.run(ask([second, first], cases, b"both"))
        assert num_decoded(second) > 0
        assert_kv_moves(alone, second, cases, "grpc")
        assert_kv_moves(first, alone, cases, "grpc")
        assert_nothing_leaked([alone, first, second])


def test_one_that_is_killed_ends_the_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the midst of steps that it computes with the other, whose requests go on elsewhere; without graphs."""
    path = make_checkpoint(tmp_path / "mixtral", "mixtral", seed=8)
    cases = untied_prompts(path, seed=33, lengths=(1, 40, 130), max_tokens=NUM_TOKENS)
    with group(path, [{}, {}], no_cuda_graphs=True, **ON_DEVICES) as (alone, [first, second]):
        asyncio.run(ask([second, first], cases, b"both"))
        asyncio.run(one_dies(first, second, alone, cases[-1:] * 4))
        assert second.process.wait(END_S) == UNAVAILABLE
        assert "worker 0 of the 2 that share experts ended: all of them end with it" in capfd.readouterr().err
