"""Priorities of threads, in a process of its own: what was lowered cannot be raised again."""

from __future__ import annotations

import subprocess
import sys

import pytest

_POLICIES = """
import os, threading
from paceline.actors import priority

ended = threading.Event()
started = [threading.Thread(target=ended.wait) for _ in range(3)]
for thread in started:
    thread.start()
{call}
later = threading.Thread(target=ended.wait)
later.start()
print([os.sched_getscheduler(thread.native_id) == os.SCHED_IDLE for thread in (*started, later)])
ended.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("priority.lower_process_priority()", [True, True, True, True]),
        ("priority.lower_priority()", [False, False, False, True]),  # a new one inherits it
    ],
)
def test_threads_give_way(call: str, expected: list[bool]) -> None:
    code = _POLICIES.format(call=call)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(expected)
