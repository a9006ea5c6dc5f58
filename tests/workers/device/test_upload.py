"""Weights read through pinned buffers equal, bit for bit, those read directly, however late the device computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.workers.common.errors import CheckpointError
from diptych.workers.device.device import Device
from diptych.workers.device.fake_device import FakeDevice, FakeEvent, FakeLane
from diptych.workers.device.upload import Upload
from diptych.workers.models.checkpoint.weights import Checkpoint, Progress, load_weights
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.sharding import WHOLE, Share
from diptych.workers.models.plan.tensor_names import Piece

from ...support.checkpoints import make_checkpoint

CPU = torch.device("cpu")
BUFFER_BYTES = 1 << 12  # of the model's matrices it takes several


def flat(weights: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors of DecoderWeights and of its fields, by name."""
    for name in weights.__slots__:
        value = getattr(weights, name)
        if isinstance(value, Tensor):
            yield name, value
        for i, layer in enumerate(value if isinstance(value, list) else ()):
            yield from ((f"{i}.{field}", tensor) for field, tensor in flat(layer))


def load(
    path: Path,
    dtype: torch.dtype,
    device: Device | None = None,
    *,
    buffer_bytes: int = BUFFER_BYTES,
    share: Share = WHOLE,
    progress: Progress = lambda _done, _total: None,
) -> dict[str, Tensor]:
    """By way of the device's buffers; without one, at once."""
    with Checkpoint(path, load_spec(path)) as checkpoint:
        if device is None:
            return dict(flat(checkpoint.load(dtype, CPU, progress, share)))
        with Upload(device, buffer_bytes) as upload:
            reader = checkpoint.reader(dtype, device.torch_device, progress, share, put=upload.put)
            weights = load_weights(reader)
    return dict(flat(weights))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].cpu(), tensor), name


def stored_as(source: Path, target: Path, dtype: torch.dtype) -> Path:
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(
        {n: t.to(dtype) for n, t in load_file(source / "model.safetensors").items()}, target / "model.safetensors"
    )
    return target


@pytest.fixture(scope="module")
def kinds(llama: Path, qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    biased = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    return {
        "float32": llama,
        "norms of heads": qwen3,
        "bfloat16": stored_as(llama, folder / "bfloat16", torch.bfloat16),
        "float16": stored_as(llama, folder / "float16", torch.float16),
        "sharded": make_checkpoint(folder / "sharded", "llama", 4, max_shard_size="300KB"),
        "tied, biases": make_checkpoint(folder / "tied", "llama", 5, **biased),
    }


KINDS = ("float32", "norms of heads", "bfloat16", "float16", "sharded", "tied, biases")


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_are_read_at_once(
    kinds: dict[str, Path], kind: str, dtype: torch.dtype, is_late: bool
) -> None:
    found = load(kinds[kind], dtype, FakeDevice(is_late=is_late))
    assert_equal(found, load(kinds[kind], dtype))
    assert (found["lm_head"] is found["embed"]) == (kind == "tied, biases")


@pytest.mark.parametrize("buffer_bytes", [8, 200, 1 << 20])
@pytest.mark.parametrize("share", [WHOLE, Share(0, 2)])
def test_any_buffer_serves_any_part(llama: Path, buffer_bytes: int, share: Share) -> None:
    """Buffers of less than a row, of a few, of a whole tensor; parts of rows, whose bytes are not in one run."""
    path = llama if buffer_bytes > 8 else make_small(llama)
    found = load(path, torch.bfloat16, FakeDevice(), buffer_bytes=buffer_bytes, share=share)
    assert_equal(found, load(path, torch.bfloat16, share=share))


def make_small(llama: Path) -> Path:
    path = llama.parent / "small"
    sizes = {"vocab_size": 10, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 4}
    return path if path.exists() else make_checkpoint(path, "llama", 6, **sizes)


class HastyDevice(FakeDevice):
    """A device whose events count as reached immediately."""

    def lane(self, name: str, *, high_priority: bool = False) -> FakeLane:
        lane = super().lane(name, high_priority=high_priority)
        record = lane.record
        lane.record = lambda: HastyEvent(record())  # pyright: ignore
        return lane


class HastyEvent(FakeEvent):
    def __init__(self, event: FakeEvent) -> None:
        self.event = event

    def wait(self) -> None:
        return


def test_a_buffer_that_is_overwritten_too_early_shows(llama: Path) -> None:
    device = HastyDevice()
    found = load(llama, torch.float32, device)
    device.synchronize()
    expected = load(llama, torch.float32)
    assert not all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("buffer_bytes", [BUFFER_BYTES, 1 << 24])
def test_progress_is_told_in_bytes_piece_by_piece(llama: Path, buffer_bytes: int) -> None:
    seen: list[tuple[int, int]] = []
    at_once: list[tuple[int, int]] = []
    load(llama, torch.bfloat16, FakeDevice(), buffer_bytes=buffer_bytes, progress=lambda *bytes_: seen.append(bytes_))
    load(llama, torch.bfloat16, progress=lambda *bytes_: at_once.append(bytes_))
    assert seen[0] == at_once[0] and seen[-1] == at_once[-1] and seen == sorted(seen)
    assert set(at_once) <= set(seen)
    assert (len(seen) > len(at_once)) == (buffer_bytes == BUFFER_BYTES)


class Allocations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func._schema.is_mutable and not func.is_view:
            self.num_bytes.append(result.nbytes)
        return result


def test_a_weight_is_never_held_beside_itself() -> None:
    """Neither on the host nor on the device: the only temporary memory is one buffer for conversions."""
    device = FakeDevice()
    target, stored = torch.empty(300, 64, dtype=torch.bfloat16), torch.randn(300, 64)
    with Upload(device, BUFFER_BYTES) as upload, Allocations() as allocations:
        upload.put(target, stored, lambda _num_bytes: None)
        device.synchronize()
    assert torch.equal(target, stored.bfloat16())
    assert allocations.num_bytes == [BUFFER_BYTES]


@contextmanager
def failing_at(checkpoint: Checkpoint, num: int) -> Iterator[None]:
    read, calls = checkpoint.read, list[str]()

    def fail(piece: Piece, share: Share) -> Tensor:
        calls.append(piece.name)
        if len(calls) == num:
            raise CheckpointError(f"tensor {piece.name} cannot be read")
        return read(piece, share)

    checkpoint.read = fail  # pyright: ignore
    yield


def test_what_cannot_be_read_is_named_and_leaves_nothing_under_way(llama: Path) -> None:
    device = FakeDevice()
    with (
        Checkpoint(llama, load_spec(llama)) as checkpoint,
        failing_at(checkpoint, 7),
        pytest.raises(CheckpointError, match="cannot be read"),
        Upload(device, BUFFER_BYTES) as upload,
    ):
        load_weights(checkpoint.reader(torch.float32, CPU, put=upload.put))
    assert device.lanes and not any(lane._queue for lane in device.lanes)


@pytest.mark.parametrize("share", [WHOLE, Share(0, 2)])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_weights_on_a_gpu_are_those_on_the_cpu(kinds: dict[str, Path], share: Share) -> None:
    from diptych.workers.device.cuda_device import CudaDevice

    for path in kinds.values():
        for dtype in (torch.bfloat16, torch.float32):
            found = load(path, dtype, CudaDevice(torch.device("cuda")), share=share)
            assert_equal(found, load(path, dtype, share=share))
