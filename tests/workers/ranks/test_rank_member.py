"""A rank other than 0, and rank 0's side of what it is told until both are ready."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.kv.layout import KVLayout
from diptych.workers.models.layers.step import broadcast_message
from diptych.workers.models.plan.rank_settings import RankSettings
from diptych.workers.parallel.groups import GlooGroup
from diptych.workers.parallel.stores import DEVICES, place_beside
from diptych.workers.ranks.rank_member import RankMember

LAYOUT = KVLayout("float32", block_size=16, num_layers=1, num_kv_heads=2, head_dim=16, model_id="m", tensor_parallel=2)


class Told(FakeDevice):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def loaded(self) -> None:
        self.told.append("loaded")


def lead(rendezvous: Path, gpu: FakeDevice) -> None:
    """Rank 0's part: join, ask for the free memory, and say that all may begin."""
    control = GlooGroup.join(0, 2, rendezvous)
    gpu.group(0, 2, place_beside(rendezvous, DEVICES))
    control.gather(torch.zeros(1, dtype=torch.int64), [(1,), (1,)])
    broadcast_message(control, np.array([1], dtype=np.int32))
    control.meet()


def test_a_gpu_of_any_rank_is_told_when_all_is_loaded(tmp_path: Path) -> None:
    """From then on it warns of each kernel that is compiled."""
    settings = RankSettings("none", LAYOUT, "float32", 64, 1, 2, device="fake", rank=1, rendezvous=str(tmp_path / "r"))
    (other_end, link), gpu = socket.socketpair(), Told()
    with ThreadPoolExecutor(1) as thread, other_end, link:
        led = thread.submit(lead, Path(settings.rendezvous), FakeDevice())
        member = RankMember(settings, [link], gpu, step_bytes=0)
        assert not gpu.told
        member.meet()
        led.result()
    assert gpu.told == ["loaded"]
