"""A session's processes whose parents are gone, found by a mark in their environment.

Ray's daemon may be killed just after it has started a worker: nobody's child then, which waits a
minute for a store that is gone.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

import psutil

MARK = "PACELINE_SESSION"


def mark() -> None:
    """Have all that this process starts from now on bear a mark of its own."""
    os.environ[MARK] = secrets.token_hex(8)


def unmark() -> None:
    """The session has ended."""
    os.environ.pop(MARK, None)


def orphans() -> dict[int, float]:
    """Pid and start time of what bears this process's mark and is not below it any more."""
    own = os.environ.get(MARK)
    if own is None:
        return {}
    this = psutil.Process()
    below = {this.pid, *(child.pid for child in this.children(recursive=True))}
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # others' processes do not tell
            if process.pid not in below and process.environ().get(MARK) == own:
                found[process.pid] = process.create_time()
    return found
