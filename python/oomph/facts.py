"""Facts about GPUs and libraries for the sidecar of a recording. What cannot be had is None."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Dict, Optional, Tuple

NOT_AVAILABLE = (1 << 64) - 1
NVML_SUCCESS = 0
NVML_INSUFFICIENT_SIZE = 7


class _ProcessInfo(ctypes.Structure):
    """`nvmlProcessInfo_t` of the functions with the suffixes _v2 and _v3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """NVIDIA's management library, if there is one."""

    def __init__(self) -> None:
        self.library: Any = None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == NVML_SUCCESS:
                self.library = library
        except (OSError, AttributeError):
            pass

    def close(self) -> None:
        if self.library is not None:
            self.library.nvmlShutdown()
            self.library = None

    def driver_version(self) -> Optional[str]:
        if self.library is None:
            return None
        text = ctypes.create_string_buffer(96)
        try:
            status = self.library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        except AttributeError:
            return None
        return (
            text.value.decode(errors="replace") if status == NVML_SUCCESS and text.value else None
        )

    def memory_of_processes(self, uuid: Optional[str]) -> Tuple[Optional[int], Optional[int]]:
        """What this process and all others use on a GPU, with their contexts."""
        if self.library is None or uuid is None:
            return None, None
        try:
            return self._memory_of_processes(uuid)
        except AttributeError:
            # An old library.
            return None, None

    def _memory_of_processes(self, uuid: str) -> Tuple[Optional[int], Optional[int]]:
        handle = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if (
            self.library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
            != NVML_SUCCESS
        ):
            return None, None
        count = ctypes.c_uint(1024)
        processes = (_ProcessInfo * count.value)()
        list_processes = self.library.nvmlDeviceGetComputeRunningProcesses_v3
        if list_processes(handle, ctypes.byref(count), processes) != NVML_SUCCESS:
            return None, None
        used = {entry.pid: int(entry.used) for entry in processes[: count.value]}
        if NOT_AVAILABLE in used.values():
            return None, None
        own = used.pop(os.getpid(), None)
        if own is None and len(used) == 1:
            # In a container NVML has other process numbers. This process has a context, so it is
            # the only one.
            own = used.popitem()[1]
        return (None, None) if own is None else (own, sum(used.values()))


def nccl_version(torch: Any) -> Optional[str]:
    """The version of NCCL that PyTorch loaded."""
    try:
        version = torch.cuda.nccl.version()
    except Exception:
        return None
    if isinstance(version, int):
        return None
    return ".".join(str(part) for part in version[:3])


def describe_device(
    torch: Any, device: int, nvml: Nvml, fractions: Optional[Dict[int, float]]
) -> Dict[str, Any]:
    """One device on which this process has a context."""
    properties = torch.cuda.get_device_properties(device)
    total: Optional[int] = int(properties.total_memory)
    free: Optional[int] = None
    try:
        free, total = (int(value) for value in torch.cuda.mem_get_info(device))
    except Exception:
        # After a CUDA error the device does not answer.
        pass
    fraction = memory_fraction(torch, device, fractions)
    # PyTorch cuts the product to whole bytes, and computes the fraction that it tells from those.
    limit = (
        round(fraction * properties.total_memory)
        if fraction is not None and fraction < 1.0
        else None
    )
    stats = torch.cuda.memory_stats(device)
    process, others = nvml.memory_of_processes(uuid_of(properties))

    def stat(name: str) -> Optional[int]:
        return int(stats[name]) if name in stats else None

    return {
        "index": device,
        "name": str(properties.name),
        "total_bytes": total,
        "free_bytes": free,
        "memory_fraction": fraction,
        "limit_bytes": limit,
        "allocated_bytes": stat("allocated_bytes.all.current"),
        "reserved_bytes": stat("reserved_bytes.all.current"),
        "peak_allocated_bytes": stat("allocated_bytes.all.peak"),
        "peak_reserved_bytes": stat("reserved_bytes.all.peak"),
        "process_bytes": process,
        "other_processes_bytes": others,
    }


def memory_fraction(
    torch: Any, device: int, fractions: Optional[Dict[int, float]]
) -> Optional[float]:
    """The fraction of `set_per_process_memory_fraction`; 1.0 where the program set none."""
    ask = getattr(torch._C, "_cuda_getMemoryFraction", None)
    if ask is not None:
        try:
            return float(ask(device))
        except Exception:
            return None
    return None if fractions is None else fractions.get(device, 1.0)


def uuid_of(properties: Any) -> Optional[str]:
    """Older releases of PyTorch do not know it."""
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)
