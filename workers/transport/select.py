"""Makes a worker's transports: those that the settings name and this machine supports, in that order."""

import logging
import socket
from collections.abc import Sequence
from typing import Literal

from ..common.errors import ConfigError, TransportError
from ..kv.device_kv import DeviceKV
from ..kv.layout import Region
from .base import Transport
from .cuda_ipc import CudaIpcTransport
from .grpc import GrpcTransport
from .nixl import NixlTransport
from .shared_memory import SharedMemoryTransport

NAMES = ("cuda_ipc", "shared_memory", "nixl", "grpc")
_ON_SEVERAL = "this worker's KV is on several machines, of which the other transports reach one"

log = logging.getLogger("diptych.transport")


def make_transports(
    names: Sequence[str] | Literal["auto"],
    regions: Sequence[Region],
    device: DeviceKV | None = None,
    rank_links: Sequence[socket.socket] = (),
    *,
    has_rdma: bool = False,
) -> dict[str, Transport]:
    """Make the transports, by name, preferred first. "auto": CUDA IPC between pools in device memory, shared memory
    between those in host memory, NIXL where it works, then gRPC; gRPC alone for a pool on several machines. `regions`:
    what is read and written, first the pool that peers read, which `device` is where it is in device memory or on
    several machines. rank_links: see KVMemory. has_rdma: NIXL may use the machine's RDMA devices, whose fabric is
    trusted.

    Blocks for a second or two (loading NIXL). Raises ConfigError for an unknown name, or for a named transport that
    does not work here.
    """
    made: dict[str, Transport] = {}
    for name in _auto(device) if names == "auto" else names:
        try:
            made[name] = _make(name, regions, device, rank_links, has_rdma=has_rdma)
        except (ImportError, TransportError) as e:
            if names != "auto":
                raise ConfigError(f"the transport {name!r} is not usable: {e}. Leave it out, or use 'auto'") from e
            log.info("without the transport %s: %s", name, e)
    if not made:
        raise ConfigError("no transport is usable: set transports to one of " + ", ".join(NAMES))
    return made


def _auto(device: DeviceKV | None) -> Sequence[str]:
    if device is not None and not device.is_on_one_machine:
        log.info("KV moves over gRPC alone: %s", _ON_SEVERAL)
        return (GrpcTransport.name,)
    other = SharedMemoryTransport if device is not None else CudaIpcTransport
    return [name for name in NAMES if name != other.name]


def _make(
    name: str,
    regions: Sequence[Region],
    device: DeviceKV | None,
    rank_links: Sequence[socket.socket],
    *,
    has_rdma: bool,
) -> Transport:
    if name in NAMES and name != GrpcTransport.name and device is not None and not device.is_on_one_machine:
        raise TransportError(_ON_SEVERAL)
    if name == "cuda_ipc":
        if device is None or device.driver is None:
            raise TransportError("this worker's KV is not in CUDA memory")
        return CudaIpcTransport(regions[0], device, device.driver)
    if name == "shared_memory":
        return SharedMemoryTransport(regions[0])
    if name == "nixl":
        on_device = (None, None) if device is None else (device.driver, device.staging)
        return NixlTransport(regions, *on_device, rank_links, has_rdma=has_rdma)
    if name == "grpc":
        return GrpcTransport()
    raise ConfigError(f"unknown transport {name!r}: choose from {', '.join(NAMES)}, or 'auto'")
