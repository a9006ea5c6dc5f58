"""Workers that share the experts of a mixture, each with its own requests: the same tokens as transformers."""

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from diptych.workers.common.exit_codes import UNAVAILABLE

from ..support.checkpoints import make_checkpoint, untied_prompts
from ..support.harness import WorkerHandle, assert_nothing_leaked, unlike_workers
from ..support.heads import make_mtp
from .test_tensor_parallel import END_S, FLAGS, NUM_TOKENS, Cases, answer, assert_kv_moves, info, routed

LENGTHS = (1, 40, 130)

pytestmark = pytest.mark.e2e


@contextmanager
def group(
    path: Path, own: Sequence[dict[str, object]], **flags: object
) -> Generator[tuple[WorkerHandle, list[WorkerHandle]]]:
    """A worker that has all experts, to prefill, and some that share them. own: flags of each of those."""
    shared = {**FLAGS, "data_parallel": len(own), "rendezvous": path.parent / "rendezvous", **flags}
    each = [("prefill", FLAGS), *(("decode", shared | {"data_rank": rank} | of) for rank, of in enumerate(own))]
    with unlike_workers(path, each) as [alone, *members]:
        yield alone, members


async def ask(handles: Sequence[WorkerHandle], cases: Cases, salt: bytes) -> None:
    async with routed(*handles) as router:
        calls = [answer(router, prompt, salt + b"%d" % i) for i, (prompt, _) in enumerate(cases)]
        assert await asyncio.gather(*calls) == [tokens for _, tokens in cases]


def num_decoded(handle: WorkerHandle) -> int:
    return handle.settled_state().load.num_decode_tokens


def num_drafted(handle: WorkerHandle) -> int:
    return sum(of.num_drafted for of in handle.settled_state().load.drafts)


def test_a_group_of_two(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first one has a head that drafts, with experts of its own: it needs nobody else's."""
    path = make_checkpoint(tmp_path / "mixtral", "mixtral", seed=8)
    cases = untied_prompts(path, seed=33, lengths=LENGTHS, max_tokens=NUM_TOKENS)
    head = make_mtp(tmp_path / "head", path, "deepseek", 5, alone=True)
    with group(path, [{"speculation": "mtp", "draft_model": head}, {}]) as (alone, [first, second]):
        asyncio.run(ask([first], cases, b"one"))
        assert num_decoded(first) > 0 and num_decoded(second) == 0
        assert num_drafted(first) > 0
        asyncio.run(ask([second, first], cases, b"both"))
        assert num_decoded(second) > 0
        assert_kv_moves(alone, second, cases, "grpc")
        assert_kv_moves(first, alone, cases, "grpc")
        assert_nothing_leaked([alone, first, second])
        asyncio.run(one_dies(first, second, alone, cases[-1:] * 4))
        assert second.process.wait(END_S) == UNAVAILABLE
        assert "worker 0 of the 2 that share experts ended: all of them end with it" in capfd.readouterr().err


async def one_dies(
    first: WorkerHandle, second: WorkerHandle, alone: WorkerHandle, cases: Cases, after: int = 2 * NUM_TOKENS
) -> None:
    """A worker ends while the second decodes what it prefilled. Both end; a separate worker continues. after: answers'
    parts that have come."""
    num_parts = 0
    async with routed(first, second) as router:

        def count() -> None:
            nonlocal num_parts
            num_parts += 1
            if num_parts == after:
                router.update_fleet([info(each) for each in (first, second, alone)])
                first.process.kill()

        calls = [answer(router, prompt, b"killed %d" % i, count) for i, (prompt, _) in enumerate(cases)]
        assert await asyncio.gather(*calls) == [tokens for _, tokens in cases]


def test_a_group_of_three_and_what_is_prefilled_elsewhere(tmp_path: Path) -> None:
    """Nine requests at once, three of each prompt; layer 2 has no experts. A model, a mixture too, drafts for two of
    the workers, whole on each."""
    path = make_checkpoint(tmp_path / "qwen3moe", "qwen3moe", seed=9)
    cases = untied_prompts(path, seed=34, lengths=(5, 40, 90), max_tokens=NUM_TOKENS) * 3
    draft: dict[str, object] = {"speculation": "draft", "draft_model": path}
    with group(path, [draft, {}, draft], expert_placement="round_robin") as (alone, members):
        asyncio.run(ask([alone, *members], cases, b"handed over"))
        received = [member.settled_state().load.num_handoffs_received for member in members]
        assert sum(received) == len(cases) and min(received) > 0
        assert num_drafted(members[0]) > 0 and num_drafted(members[2]) > 0
        assert_nothing_leaked([alone, *members])
