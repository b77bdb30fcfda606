"""NVIDIA devices, as NVML tells them where the package nvidia-ml-py is installed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NvidiaDevice:
    name: str
    memory_bytes: int
    compute_capability: str
    driver: str


def nvidia_devices() -> tuple[NvidiaDevice, ...] | None:
    """None without the package, or where no driver answers."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            NvidiaDevice(
                pynvml.nvmlDeviceGetName(handle),
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle))),
                driver,
            )
            for handle in handles
        )
    finally:
        pynvml.nvmlShutdown()
