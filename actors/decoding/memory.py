"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes that the system, and the container where there is one, can still give.

    Args:
        meminfo: the kernel's figures; where they are missing, half of all memory counts as free.
        cgroup: of this process, version 2.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit = int((cgroup / "memory.max").read_text())
        return min(free, max(0, limit - int((cgroup / "memory.current").read_text())))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
