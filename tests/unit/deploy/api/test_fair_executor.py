"""Work on threads: what is next, and how much may wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline.deploy.api.admission import ConcurrencyLimiter
from paceline.deploy.api.fair_executor import FairExecutor
from paceline.deploy.api.request_parser import BodyWorkers
from paceline.deploy.errors import ApiError


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


def test_large_bodies_count_as_sequences_until_they_are_read() -> None:
    limiter, may_end, large = ConcurrencyLimiter(2, per_client=1), threading.Event(), 2**20
    workers = BodyWorkers(limiter)

    def slow() -> bool:
        return may_end.wait(10)

    async def ask() -> None:
        waiting = []
        try:
            for client, refused_as in (("hog", 429), ("other", 503)):
                waiting.append(asyncio.ensure_future(workers.run(client, large, slow)))
                await asyncio.sleep(0)
                with pytest.raises(ApiError) as refused:
                    await workers.run(client, large, slow)
                assert refused.value.status == refused_as
            assert await workers.run("hog", 9, lambda: 7) == 7
        finally:
            may_end.set()
            assert all(await asyncio.gather(*waiting))
        assert limiter.running == 0

    asyncio.run(ask())
