"""GPUs by name, from their vendors' datasheets. Dense rates: without sparsity."""

from dataclasses import dataclass

from ...workers.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gpu:
    flops_s: float  # BF16, dense
    bytes_s: float  # of its memory
    memory_bytes: float
    peer_bytes_s: float  # to the other GPUs of the machine, in one direction
    source: str
    has_fp8: bool = True  # in the form that the kernels here multiply (e4m3fn)


GPUS = {
    "A100": Gpu(
        312e12,
        2.039e12,
        80e9,
        300e9,
        "NVIDIA A100 Tensor Core GPU datasheet: A100 80GB SXM, NVLink 600 GB/s",
        has_fp8=False,
    ),
    "H100": Gpu(989.4e12, 3.35e12, 80e9, 450e9, "NVIDIA H100 Tensor Core GPU datasheet: H100 SXM, NVLink 900 GB/s"),
    "H200": Gpu(989.4e12, 4.8e12, 141e9, 450e9, "NVIDIA H200 Tensor Core GPU datasheet: H200 SXM, NVLink 900 GB/s"),
    "B200": Gpu(2.25e15, 8e12, 180e9, 900e9, "NVIDIA DGX B200 datasheet: an eighth of 8 GPUs, NVLink 1.8 TB/s each"),
    "L40S": Gpu(362.05e12, 864e9, 48e9, 32e9, "NVIDIA L40S datasheet: PCIe Gen4 x16, 64 GB/s both directions"),
    "MI300X": Gpu(
        1307.4e12,
        5.3e12,
        192e9,
        448e9,
        "AMD Instinct MI300X datasheet: Infinity Fabric, 896 GB/s",
        has_fp8=False,
    ),
}


def gpu_of(name: str) -> Gpu:
    """Raises ConfigError."""
    found = GPUS.get(name.upper())
    if found is None:
        raise ConfigError(f"there is no GPU {name!r}: choose one of {', '.join(GPUS)}, or give --profile")
    return found
