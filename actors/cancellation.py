"""Whose cancellation a CancelledError is."""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether the running task is cancelled; if not, a CancelledError says that a call was."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
