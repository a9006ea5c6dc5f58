"""Workers that share experts, each with a device of its own: real processes, fake devices. Tokens are transformers'."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.exit_codes import UNAVAILABLE
from diptych.workers.models.families.registry import load_spec

from ..support.checkpoints import make_checkpoint, untied_prompts
from ..support.harness import assert_nothing_leaked
from ..support.heads import make_mtp
from ..workers.execution.gpu.conftest import EVEN
from .test_data_parallel import ask, group, num_decoded, num_drafted, one_dies
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


@pytest.mark.parametrize("method", ["draft", "self", "mtp"])
def test_one_that_is_killed_while_all_draft_ends_the_other(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each drafts whole by itself, or both together by layers of the model."""
    path = make_checkpoint(tmp_path / "mixtral", "mixtral", seed=8)
    cases = untied_prompts(path, seed=33, lengths=(1, 40, 130), max_tokens=NUM_TOKENS)
    skipped, head = tmp_path / "skipped.json", tmp_path / "head"
    skipped.write_text(json.dumps({"num_layers": load_spec(path).num_layers, "skipped_layers": [1]}))
    own: dict[str, Any] = {"speculation": method, "max_draft_tokens": 3}
    own |= {"skipped_layers": skipped} if method == "self" else {"draft_model": path if method == "draft" else head}
    if method == "mtp":
        make_mtp(head, path, "deepseek", 5, alone=True)
    with group(path, [{}, {}], **own, **ON_DEVICES) as (alone, [first, second]):
        asyncio.run(ask([first], cases, b"one"))
        assert num_drafted(first) > 0 and num_decoded(second) == 0
        asyncio.run(ask([second, first], cases, b"both"))
        assert num_drafted(second) > 0
        assert_kv_moves(first, second, cases, "grpc")
        assert_nothing_leaked([alone, first, second])
        asyncio.run(one_dies(first, second, alone, cases[-1:] * 4, after=NUM_TOKENS // 2))
        assert second.process.wait(END_S) == UNAVAILABLE
        assert "worker 0 of the 2 that share experts ended: all of them end with it" in capfd.readouterr().err
