"""All records of thin traffic, so many a second of a flood, each topic for itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.replay.selection import LeftOut, RecordRateLimiter


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def kept_of(limiter: RecordRateLimiter, clock: Clock, gaps: list[float], topic: str = "sql") -> int:
    kept = 0
    for gap in gaps:
        clock.now += gap
        kept += limiter.acquire(topic)
    return kept


def test_thin_traffic_is_kept_whole_and_of_a_flood_the_rate() -> None:
    clock = Clock()
    limiter = RecordRateLimiter(2.0, clock)
    assert kept_of(limiter, clock, [0.5] * 400) == 400
    clock.now += 100.0
    assert kept_of(limiter, clock, [0.01] * 10_000) == pytest.approx(2.0 * 100 + 32, abs=2)


def test_a_flood_of_one_topic_takes_nothing_from_another() -> None:
    clock = Clock()
    limiter = RecordRateLimiter(1.0, clock)
    assert kept_of(limiter, clock, [0.0] * 100) == 16
    assert limiter.acquire("shell")
    assert not limiter.acquire("sql")


def test_requests_without_a_record_are_counted_once_and_by_topic() -> None:
    left_out = LeftOut()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(left_out.add, ["sql"] * 400))
    assert (left_out.take("shell"), left_out.take("sql")) == (0, 400)
    assert left_out.take("sql") == 0


def test_without_a_limit_all_is_kept() -> None:
    clock = Clock()
    assert kept_of(RecordRateLimiter(None, clock), clock, [0.0] * 1000) == 1000


def test_a_rate_below_one_a_burst_keeps_something_all_the_same() -> None:
    clock = Clock()
    limiter = RecordRateLimiter(0.01, clock)
    assert kept_of(limiter, clock, [10.0] * 100) == pytest.approx(10, abs=1)


def test_none_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="max_records_per_s"):
        RecordRateLimiter(0.0, Clock())


@given(
    st.floats(0.01, 50.0),
    st.lists(st.floats(0.0, 20.0), max_size=60),
)
def test_never_more_than_burst_and_rate_allow(per_s: float, gaps: list[float]) -> None:
    clock = Clock()
    kept = kept_of(RecordRateLimiter(per_s, clock), clock, gaps)
    assert kept <= max(1.0, 16 * per_s) + per_s * sum(gaps) + 1e-6
    assert kept >= min(len(gaps), 1)
