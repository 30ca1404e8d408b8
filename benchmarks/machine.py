"""Facts of the machine and of this process that belong beside every figure."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

_MIB = 2.0**20


def facts() -> dict[str, Any]:
    """Processor, cores, memory, accelerator, versions, and how busy it is now."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def rss_mib() -> float:
    """Resident memory of this process now."""
    return round(psutil.Process().memory_info().rss / _MIB, 1)


def peak_rss_mib() -> float:
    """The most it ever had (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (_MIB if platform.system() == "Darwin" else 1024.0), 1)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
