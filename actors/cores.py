"""The processor cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")  # in a container its own
_QUOTA_FILES = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))  # cgroup v2, v1


def available_cores() -> int:
    """Return the cores that this process may use: of its affinity, within its container's quota.

    A quota is rounded down: threads of a parallel operation wait for the one that is throttled.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return min(cores, _quota() or cores)


def quota_cores(text: str) -> int | None:
    """Whole cores of a CPU quota, at least one; None if there is no quota.

    Args:
        text: quota and period in microseconds, as in ``cpu.max``: no quota is ``max``, or -1 in
            cgroup v1.

    Raises:
        ValueError: it is something else.
    """
    quota, period = text.split()
    return None if quota in ("max", "-1") else max(1, int(quota) // int(period))


def default_threads(cores: int) -> int:
    """Threads of the target by default: half of the cores, at least two of them."""
    return min(cores, max(2, cores // 2))


def _quota() -> int | None:
    for names in _QUOTA_FILES:
        try:
            return quota_cores(" ".join((_CGROUP / name).read_text() for name in names))
        except (OSError, ValueError):
            continue
    return None
