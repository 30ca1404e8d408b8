"""Work on threads: what is next, and how much may wait."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

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


def test_what_runs_for_a_client_that_has_gone_counts_until_it_ends() -> None:
    limiter, may_end, large = ConcurrencyLimiter(9, per_client=2), threading.Event(), 2**20
    workers, began = BodyWorkers(limiter), threading.Semaphore(0)

    def slow() -> bool:
        began.release()
        return may_end.wait(10)

    async def ask() -> None:
        first, second = (asyncio.ensure_future(workers.run("hog", large, slow)) for _ in "ab")
        await asyncio.sleep(0)
        assert began.acquire(timeout=5)
        try:
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled()  # its request need not wait
            with pytest.raises(ApiError) as refused:
                await workers.run("hog", large, slow)
            assert refused.value.status == 429
            assert not began.acquire(timeout=0.1)  # the second has no thread meanwhile
            second.cancel()
            await asyncio.wait([second])
            assert limiter.running == 1
        finally:
            may_end.set()
        assert await asyncio.wait_for(workers.run("hog", large, lambda: 7), 5) == 7
        assert limiter.running == 0
        assert not began.acquire(timeout=0.1)  # what was given up never runs

    asyncio.run(ask())


def test_the_error_of_what_runs_for_a_client_that_has_gone_is_no_news() -> None:
    executor, began, may_end = FairExecutor(1, "test"), threading.Event(), threading.Event()
    reports: list[dict[str, Any]] = []

    def work() -> None:
        began.set()
        may_end.wait(10)
        raise ApiError(400, "invalid")

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        running = asyncio.ensure_future(executor.run("gone", work))
        await asyncio.sleep(0)
        assert began.wait(5)
        running.cancel()
        await asyncio.wait([running])
        may_end.set()
        assert await executor.run("other", lambda: 7) == 7
        del running
        gc.collect()

    asyncio.run(ask())
    assert reports == []


def test_what_waits_for_a_thread_is_freed_when_its_client_goes() -> None:
    executor, may_end = FairExecutor(1, "test"), threading.Event()

    async def ask() -> None:
        hog = asyncio.ensure_future(executor.run("hog", lambda: may_end.wait(10)))
        await asyncio.sleep(0)

        def work() -> None:
            pytest.fail("it was given up")

        body = weakref.ref(work)
        waiting = asyncio.ensure_future(executor.run("other", work))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        del work, waiting
        gc.collect()
        try:
            assert body() is None
        finally:
            may_end.set()
            assert await hog

    asyncio.run(ask())
