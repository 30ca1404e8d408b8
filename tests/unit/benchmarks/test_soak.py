"""The soak's rule: what climbs is found, what fills, jumps or swings is not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from engines import make_engine, request, run
from hypothesis import given
from hypothesis import strategies as st
from soak import Reading, blocks_held, faults_of, growth_of, growths_of, series_of, usage_of

MINUTES = [60.0 * i for i in range(31)]
TOLERANCE = (0.05, 10.0)
SENT = {"stream": 9, "bad": 0}


def test_a_leak_is_found_also_a_slow_one() -> None:
    assert growth_of(MINUTES, [1000 + 3.0 * i for i in range(31)], TOLERANCE).grows
    assert growth_of(MINUTES, [10 + 1.0 * i for i in range(31)], TOLERANCE).grows


def test_what_fills_and_stays_is_no_leak() -> None:
    filling = [1000 * (1 - math.exp(-i / 3)) for i in range(31)]
    assert not growth_of(MINUTES, filling, TOLERANCE).grows


@given(st.lists(st.floats(0, 500), min_size=31, max_size=31), st.integers(1, 4))
def test_peaks_and_saw_teeth_are_no_leak(peaks: list[float], every: int) -> None:
    swinging = [
        1000 + (peak if i % 5 == 0 else 0) + 40 * (i % every) for i, peak in enumerate(peaks)
    ]
    assert not growth_of(MINUTES, swinging, TOLERANCE).grows


@given(st.floats(1.0, 100.0))
def test_a_leak_under_saw_teeth_is_found(step: float) -> None:
    climbing = [1000 + 10 * step * i + 20 * (i % 3) for i in range(31)]
    growth = growth_of(MINUTES, climbing, TOLERANCE)
    assert growth.rise == pytest.approx(10 * step * 20, rel=0.1, abs=50)
    assert growth.grows


def test_two_measurements_are_no_series() -> None:
    with pytest.raises(ValueError, match="three"):
        growth_of([0.0, 1.0], [1.0, 2.0], TOLERANCE)


def held(memory: int) -> dict[str, int]:
    return {"rss": memory, "pss": memory, "files": 20, "sockets": 5, "threads": 9}


def reading(at: float, pss: int, pid: int = 7, running: int = 0) -> Reading:
    series = series_of({f"target/{pid}": held(pss)}, 0)
    return Reading(at, series, running=running, waiting=0, blocks_held=0, versions=int(at))


def test_the_usage_of_a_process_is_read() -> None:
    import psutil

    found = usage_of(psutil.Process())
    assert found is not None
    assert found.keys() == held(0).keys()
    assert 0 < found["pss"] <= found["rss"]
    assert found["files"] > 0


def test_the_soak_says_what_is_wrong() -> None:
    flat = [reading(60.0 * i, 10**9) for i in range(10)]
    assert faults_of(flat, growths_of(flat), SENT, {}) == []
    climbing = [reading(60.0 * i, 10**9 + i * 10**8) for i in range(10)]
    faults = faults_of(climbing, growths_of(climbing), SENT, {})
    assert faults == ["all pss grows", "target/7 pss grows", "target/7 rss grows"]
    restarted = [*flat[:5], *(reading(60.0 * i, 10**9, pid=8, running=1) for i in range(5, 10))]
    faults = faults_of(restarted, growths_of(restarted), SENT, {})
    assert faults[0] == "target/7 is gone or was restarted"
    assert "1 requests run" in faults[1]


def test_a_soak_in_which_nothing_is_sent_or_swapped_says_nothing() -> None:
    flat = [replace(reading(60.0 * i, 10**9), versions=4) for i in range(10)]
    faults = faults_of(flat, growths_of(flat), {"stream": 0}, {})
    assert faults == ["no draft was swapped: the version of none rose", "no request was sent"]


def test_blocks_that_nobody_gives_back_are_found() -> None:
    flat = [reading(60.0 * i, 10**9) for i in range(10)]
    leaking = [*flat[:-1], replace(flat[-1], blocks_held=3)]
    faults = faults_of(leaking, growths_of(leaking), SENT, {})
    assert faults == ["3 KV blocks are held after the end"]
    assert blocks_held({"kv_blocks_total": 24, "kv_blocks_available": 21}) == 3
    assert blocks_held({"error": "ActorDiedError"}) == -1


def test_what_the_prefix_cache_remembers_is_not_held() -> None:
    engine, prompt = make_engine(), list(range(3, 43))

    def now_held() -> int:
        total, available = engine.kv_blocks
        return blocks_held({"kv_blocks_total": total, "kv_blocks_available": available})

    engine.add(request("a", prompt))
    engine.step()
    assert now_held() > 0
    run(engine)
    assert now_held() == 0
    assert run(engine, [request("b", prompt)])["b"][-1].chunk.num_cached_tokens > 0
    assert now_held() == 0


def test_processes_that_come_and_stay_are_found_though_none_of_them_grows() -> None:
    breeding = [
        replace(
            reading(60.0 * i, 10**9),
            series=series_of({f"target/{7 + j}": held(10**8) for j in range(i + 1)}, 0),
        )
        for i in range(10)
    ]
    faults = faults_of(breeding, growths_of(breeding), SENT, {})
    assert faults == ["all processes grows", "all pss grows"]
