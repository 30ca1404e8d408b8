"""Whose work on threads is next."""

from __future__ import annotations

import asyncio
import threading

from paceline.deploy.api.fair_executor import FairExecutor


def test_a_client_with_much_work_leaves_a_thread_to_others() -> None:
    executor, may_end = FairExecutor(2, "test"), threading.Event()

    async def asked() -> int:
        def slow() -> bool:
            return may_end.wait(10)

        hog = [asyncio.ensure_future(executor.run("hog", slow)) for _ in range(8)]
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(executor.run("other", lambda: 7), 5)
        finally:
            may_end.set()
            assert all(await asyncio.gather(*hog))

    assert asyncio.run(asked()) == 7
    executor.close(may_end.clear)
    assert not may_end.is_set()
