"""A cluster whose decode workers share the experts of a mixture: started, lost and started again as one."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from ..support.checkpoints import make_checkpoint
from ..support.cluster_harness import Served, diptych, load, serving
from ..support.harness import TINY

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]


def decoders(served: Served) -> dict[str, int]:
    """Process ids by worker id."""
    return {w["worker_id"]: w["pid"] for w in served.status()["workers"] if w["pool"] == "decode"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("fake", marks=pytest.mark.long)])
def test_a_gang_is_replaced_as_a_whole_and_no_request_fails(tmp_path: Path, device: str) -> None:
    model = make_checkpoint(tmp_path / "mixtral", "mixtral", seed=8)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, model)
    (tmp_path / "cluster.yaml").write_text(
        "pools:\n  prefill: {replicas: 1, cuda_graphs: false}\n"
        "  decode: {replicas: 1, data_parallel: 2, threads: 1, max_running: 8, cuda_graphs: false}\n"
        f"device: {device}\n"
    )

    async def main(served: Served) -> None:
        before = await asyncio.to_thread(decoders, served)
        assert list(before) == ["decode-2.0", "decode-2.1"]
        async with load(served.grpc_address, num_tokens=24) as result:
            await result.until_done(4)
            os.kill(before["decode-2.1"], signal.SIGKILL)
            await result.until_done(6)
            scaled = await asyncio.to_thread(diptych, served.home, "scale", "decode=1")  # returns once it is there
            assert scaled.returncode == 0, scaled.stderr
        assert not result.errors
        after = await asyncio.to_thread(decoders, served)
        assert list(after) == ["decode-3.0", "decode-3.1"] and not {*after.values()} & {*before.values()}

    with serving(tmp_path, "--config", "cluster.yaml", model=str(model)) as served:
        asyncio.run(main(served))
        served.assert_nothing_is_held()
