"""Loading that fails once its backend is built, or while it is: what was made by then ends, and nobody waits for it."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from diptych.workers.common.errors import ConfigError, RankLost
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.device.device import Lane, Work
from diptych.workers.device.device_group import FakeGroup
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution.draft.draft_source import DraftSource
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.parallel.stores import Place

from ...support.gpu.serving import FEW_CAPTURES
from ..conftest import CheckpointOf

NUM_CAPTURED = 7  # graphs, before memory is too little: some of decodes
END_S = 60.0  # for what must happen; no test passes by waiting


class ScarceDevice(FakeDevice):
    """A FakeDevice whose memory may be too little for further graphs, and which notes what is left of them when its
    group ends."""

    def __init__(self, both_full: threading.Barrier | None = None) -> None:
        """both_full: where two such devices meet before their memory is too little; None: it suffices."""
        super().__init__(is_late=False)
        self._both_full = both_full
        self.captured: list[weakref.ref[Any]] = []
        self.left: list[int] = []

    def capture(self, lane: Lane, work: Work) -> Callable[[], None]:
        if self._both_full is not None and self.num_captured == NUM_CAPTURED:
            self._both_full.wait(END_S)
            raise torch.OutOfMemoryError("CUDA out of memory")
        replay = super().capture(lane, work)
        self.captured.append(weakref.ref(replay))
        return replay

    def group(self, rank: int, size: int, place: Place) -> FakeGroup:
        group = super().group(rank, size, place)
        close = group.close

        def closed() -> None:
            self.left.append(sum(replay() is not None for replay in self.captured))
            close()

        group.close = closed  # type: ignore[method-assign]
        return group


def load(path: Path, folder: Path, rank: int, gpu: FakeDevice | None) -> tuple[str, list[RankLost]]:
    """Load one of two workers that share experts, which fails. Returns what it raises, and the losses that it
    reports."""
    shared = {"data_parallel": 2, "data_rank": rank, "rendezvous": str(folder / "rendezvous"), "max_running": 6}
    config = WorkerConfig.of(path, dtype="float32", kv_memory_bytes=4 << 20, max_context_tokens=512, threads=1)
    lost: list[RankLost] = []
    with pytest.raises((ConfigError, RankLost)) as raised, FEW_CAPTURES:
        ModelRunner.load(config.changed(**shared), on_loss=lost.append, gpu=gpu)
    return str(raised.value), lost


def num_threads() -> int:
    return sum(of.name in ("diptych-peers", "diptych-data-parallel") for of in threading.enumerate())


@pytest.mark.parametrize("is_gpu", [True, False])
def test_a_backend_is_closed_where_what_drafts_cannot_be_loaded(
    is_gpu: bool, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    """A worker does not take the end of its own sockets for the loss of another."""
    gpus = [ScarceDevice() if is_gpu else None for _ in range(2)]
    first_has_ended = threading.Event()

    def refuse(_: DraftSource, config: WorkerConfig, *others: object) -> None:
        if config.parallel.data_rank:
            first_has_ended.wait(END_S)
        raise ConfigError("the draft is too large")

    with patch.object(DraftSource, "load", refuse), ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(load, checkpoint_of("mixtral"), tmp_path, r, gpus[r]) for r in range(2))
        assert first.result(END_S) == ("the draft is too large", [])
        num_left = num_threads()
        first_has_ended.set()
        second.result(END_S)
    assert num_left <= 1 and not num_threads()
    for gpu in gpus:
        assert gpu is None or (gpu.captured and set(gpu.left) == {0})


def test_graphs_are_freed_before_their_group_ends(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    """Where memory is too little for all graphs: a communicator ends no sooner than those that hold its calls."""
    both_full = threading.Barrier(2)
    gpus = [ScarceDevice(both_full) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(partial(load, checkpoint_of("mixtral"), tmp_path), range(2), gpus))
    for text, _ in found:
        assert "the GPU has too little memory left for the buffers and graphs of steps" in text
    assert not num_threads()
    assert [(len(gpu.captured), set(gpu.left)) for gpu in gpus] == [(NUM_CAPTURED, {0})] * 2
