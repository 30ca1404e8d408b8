"""Recent traffic and notices of arriving requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.request import (
    GenerationChunk,
    GenerationRequest,
    SamplingParams,
    SpeculativeStats,
)
from paceline.deploy.api.traffic import COLUMNS, ArrivalNotifier, RecentTraffic


def asked(topic: str = "sql", draft: str = "sql", k: int | None = None) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=9)
    return GenerationRequest("r", (1,), sampling, topic, draft, num_speculative_tokens=k)


LAST = GenerationChunk("x", (1, 2), "stop", SpeculativeStats("sql", 3, 4, 16, 6), num_cut_tokens=1)


def sums(recent: RecentTraffic, since: float = 0.0) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in recent.rows(since)["rows"]:
        found.update(dict(zip(COLUMNS[3:], row[3:], strict=True)))
    return found


@given(
    st.lists(
        st.tuples(
            st.floats(0, 40), st.sampled_from(["sql", "math"]), st.sampled_from(["a", "b@0", "off"])
        ),
        max_size=60,
    )
)
def test_recent_traffic_has_the_last_minutes_and_nothing_older(
    steps: list[tuple[float, str, str]],
) -> None:
    now = 1_700_000_000.0
    recent = RecentTraffic("me", lambda: now, bucket_s=5.0, keep_s=100.0)
    came: list[tuple[float, str, str]] = []
    for pause, topic, draft in steps:
        now += pause
        recent.record(asked(topic, draft), LAST)
        came.append((now, topic, draft))
    rows = recent.rows()["rows"]
    counted = Counter({(row[0], row[1], row[2]): row[3] for row in rows})
    wanted = Counter((at // 5.0 * 5.0, topic, draft) for at, topic, draft in came)
    edge = now - 100.0
    assert counted == Counter({key: n for key, n in wanted.items() if key[0] + 5.0 > edge})
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert len(recent._buckets) <= 21


def test_a_row_has_the_figures_of_the_requests_that_ended() -> None:
    recent = RecentTraffic("me", lambda: 1003.0)
    recent.record(asked(), GenerationChunk("a", (7, 8, 9)))
    recent.record(asked(), LAST)
    recent.record_all([asked("math", k=0)], [GenerationChunk("a", (7,), "length")])
    view = recent.rows()
    assert view["columns"] == list(COLUMNS)
    assert view["rows"] == [
        [1000.0, "sql", "sql", 1, 6, 4, 16, 6],
        [1000.0, "math", "off", 0, 1, 0, 0, 0],
    ]
    assert (view["replica"], view["now"], view["bucket_s"]) == ("me", 1003.0, 5.0)


def test_chunks_of_requests_that_may_use_drafts_are_passed_on() -> None:
    seen: list[tuple[GenerationRequest, GenerationChunk]] = []
    recent = RecentTraffic("me", lambda: 1000.0, observe=lambda *own: seen.append(own))
    other = GenerationChunk("a", (7,))
    recent.record(asked(draft="off"), other)
    recent.record(asked(k=0), other)
    recent.record(asked(), LAST)
    recent.record(asked(k=2), LAST)
    assert seen == [(asked(), LAST), (asked(k=2), LAST)]


def test_since_leaves_out_what_has_ended_by_then() -> None:
    now = 1000.0
    recent = RecentTraffic("me", lambda: now)
    for pause in (0.0, 6.0, 6.0):
        now += pause
        recent.record(asked(), LAST)
    assert sums(recent)["requests"] == 3
    assert sums(recent, since=1005.0)["requests"] == 2
    assert sums(recent, since=1012.0)["requests"] == 1


def test_watched_pieces_are_the_same_and_closing_closes_them() -> None:
    recent, closed = RecentTraffic("me", lambda: 0.0), []

    async def pieces() -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        try:
            while True:
                yield 1, LAST
        finally:
            closed.append(True)

    async def read() -> None:
        watched = recent.record_stream(pieces(), [asked("a"), asked("b")])
        assert await anext(watched) == (1, LAST)
        await watched.aclose()

    asyncio.run(read())
    assert closed == [True]
    assert [row[1] for row in recent.rows()["rows"]] == ["b"]


class Scheduler:
    """Counts announcements, with the interface of Ray's handle."""

    def __init__(self, error: Exception | None = None) -> None:
        self.announced = 0
        self._error = error

    @property
    def announce_request(self) -> Any:
        return self

    def remote(self) -> None:
        if self._error is not None:
            raise self._error
        self.announced += 1


def test_a_burst_is_announced_once_per_interval() -> None:
    scheduler, now = Scheduler(), [100.0]
    arrivals = ArrivalNotifier(scheduler, lambda: now[0])
    for at in (100.0, 100.001, 100.019, 100.021, 105.0):
        now[0] = at
        arrivals.notify()
    assert scheduler.announced == 3


@pytest.mark.parametrize("scheduler", [None, Scheduler(RuntimeError("no such actor"))])
def test_a_scheduler_that_is_not_there_costs_no_request(scheduler: Any) -> None:
    ArrivalNotifier(scheduler, lambda: 0.0).notify()
