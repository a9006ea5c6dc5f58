"""A Device by torch.cuda: lanes are streams, graphs are CUDA graphs that share one pool of memory."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor

from ...kernels.common.lang import tell_of_compiles
from ..common.errors import ConfigError
from ..common.garbage import collector_paused
from ..parallel.stores import Place
from .device import Device, Event, Lane, Work
from .device_errors import needing_memory
from .device_group import NcclGroup
from .fake_device import FAKE, FakeDevice
from .precision import settle_products

log = logging.getLogger("diptych.worker")


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    @property
    def has_happened(self) -> bool:
        return self.event.query()


class CudaLane:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    @torch.inference_mode()
    def run(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def after(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def record(self) -> CudaEvent:
        event = torch.cuda.Event()
        event.record(self.stream)
        return CudaEvent(event)


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        """`device`: of type cuda; without an index, the current one."""
        self._device = device if ":" in str(device) else torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()  # that are left
        self._probe = torch.cuda.Event()
        self._probe_stream = torch.cuda.Stream(self._device)

    @property
    def name(self) -> str:
        return str(self._device)

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def lane(self, name: str, *, high_priority: bool = False) -> CudaLane:
        return CudaLane(torch.cuda.Stream(self._device, priority=-1 if high_priority else 0))

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.cuda.device(self._device):  # whatever is current on the thread that asks
            return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def capture(self, lane: Lane, work: Work) -> Callable[[], None]:
        assert isinstance(lane, CudaLane)
        # Once before: libraries take their workspaces, and kernels are compiled, outside of the graph.
        self.synchronize()
        lane.run(work)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # with its last graph a pool ends, and torch refuses to capture into it
            self._pool = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        lane.run(lambda: self._record(graph, work))
        return graph.replay

    def group(self, rank: int, size: int, place: Place) -> NcclGroup:
        return NcclGroup.join(rank, size, place, self._device)

    def peak_bytes(self, work: Work) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self.lane("profile").run(work)
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self._device) - before
        torch.cuda.empty_cache()
        return peak

    def loaded(self) -> None:
        tell_of_compiles(partial(_warn, self.name))

    def check(self) -> None:
        # Anew each time: of what the device has done before it was lost, it would say no more than that it was done.
        if self._probe.query():
            self._probe.record(self._probe_stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _record(self, graph: torch.cuda.CUDAGraph, work: Work) -> None:
        # Not torch.cuda.graph, which collects garbage before each of hundreds. Other threads may go on allocating.
        # When pinned memory is freed, torch records events on the streams that have used it (CachingHostAllocator.h,
        # `free`): into the graph, on a stream that captures. From then on whoever asks for pinned memory gets an error,
        # for CUDA answers no question about such an event. So nothing is collected meanwhile.
        with collector_paused():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # it would say that the capture was broken, and not by what
                    graph.capture_end()
                raise
            graph.capture_end()


def _warn(device: str, kernel: str, seconds: float) -> None:
    log.warning(
        "%s was compiled in %.1f s on %s while requests are served: please report it, with the model",
        kernel,
        seconds,
        device,
    )


def gpu_named(name: str, place: int = 0, num_ranks: int = 1, *, is_awaited: bool = False) -> Device | None:
    """GPU of a rank: the first rank of a machine has the one that torch calls `name`, each further rank the next; None:
    the CPU. is_awaited: other processes wait for what it computes, and this one may not. Raises ConfigError, also where
    torch does not see as many as `num_ranks` need."""
    if name == FAKE:
        return FakeDevice(is_late=not is_awaited)  # late, it would compute when its own host waits
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise ConfigError(f"torch does not know the device {name!r}: use cpu or cuda") from e
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use cpu or cuda")
    if device.type == "cpu":
        return None
    if not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} is set, but torch finds no GPU: use cpu, or install a GPU build of torch")
    check_num_gpus(name, num_ranks)
    if place:
        device = torch.device("cuda", (device.index or 0) + place)
    settle_products()
    with needing_memory("a context of CUDA", "end what else uses it"):
        return CudaDevice(device)


def check_num_gpus(name: str, num_ranks: int) -> None:
    """Raise ConfigError where ranks would have no GPU, see gpu_named. name: of a GPU."""
    first, num = torch.device(name).index or 0, torch.cuda.device_count()
    more = "make more visible (CUDA_VISIBLE_DEVICES; num_gpus of the pool)"
    if first >= num:
        raise ConfigError(f"device {name!r} is set, but torch finds {num}: use one of those, or {more}")
    if first + num_ranks > num:
        raise ConfigError(
            f"tensor_parallel={num_ranks} needs one GPU per rank from {name} on, but torch finds {num}: lower it, or "
            f"{more}"
        )
