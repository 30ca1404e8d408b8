"""Priority of threads and processes: what learns gives way to what serves."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_THREADS = Path("/proc/self/task")


def lower_priority(thread: int = 0) -> None:
    """Give way to everything else: SCHED_IDLE if allowed, else nice 19.

    On Linux both are of the thread and of those that it starts from now on.

    Args:
        thread: its id; 0 is the calling one.
    """
    try:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        logger.info("no SCHED_IDLE here, nice 19 instead")
    try:
        os.setpriority(os.PRIO_PROCESS, thread, 19)
    except OSError:
        logger.info("could not lower the priority", exc_info=True)


def lower_process_priority() -> None:
    """Let all threads of this process give way, those of libraries too.

    In a process that does nothing Ray's threads take a hundredth of a core, in small pieces, and
    each of them interrupts a thread that computes, and with it all that wait for that one.
    """
    threads = [int(entry.name) for entry in _THREADS.iterdir()] if _THREADS.is_dir() else [0]
    for thread in threads:
        lower_priority(thread)
