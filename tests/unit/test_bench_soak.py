"""The soak's rule: what climbs is found, what fills, jumps or swings is not."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

_BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if _BENCHMARKS not in sys.path:  # its scripts import each other as siblings, and so do we
    sys.path.append(_BENCHMARKS)

from growth import Tolerance, judge  # noqa: E402
from readings import Held, Reading  # noqa: E402
from soak import faults_of, verdicts_of  # noqa: E402

MINUTES = [60.0 * i for i in range(31)]
TOLERANCE = Tolerance(0.05, 10.0)


def test_a_leak_is_found_also_a_slow_one() -> None:
    assert judge(MINUTES, [1000 + 3.0 * i for i in range(31)], TOLERANCE).grows
    assert judge(MINUTES, [10 + 1.0 * i for i in range(31)], TOLERANCE).grows


def test_what_fills_and_stays_is_no_leak() -> None:
    filling = [1000 * (1 - math.exp(-i / 3)) for i in range(31)]
    assert not judge(MINUTES, filling, TOLERANCE).grows


@given(st.lists(st.floats(0, 500), min_size=31, max_size=31), st.integers(1, 4))
def test_peaks_and_saw_teeth_are_no_leak(peaks: list[float], every: int) -> None:
    swinging = [
        1000 + (peak if i % 5 == 0 else 0) + 40 * (i % every) for i, peak in enumerate(peaks)
    ]
    assert not judge(MINUTES, swinging, TOLERANCE).grows


@given(st.floats(1.0, 100.0))
def test_a_leak_under_saw_teeth_is_found(step: float) -> None:
    climbing = [1000 + 10 * step * i + 20 * (i % 3) for i in range(31)]
    verdict = judge(MINUTES, climbing, TOLERANCE)
    assert verdict.rise == pytest.approx(10 * step * 20, rel=0.1, abs=50)
    assert verdict.grows


def test_two_measurements_are_no_series() -> None:
    with pytest.raises(ValueError, match="three"):
        judge([0.0, 1.0], [1.0, 2.0], TOLERANCE)


def reading(at: float, pss: int, pid: int = 7, running: int = 0) -> Reading:
    held = Held("target", pid, rss=pss, pss=pss, files=20, sockets=5, threads=9)
    return Reading(at, (held,), object_store=0, running=running, waiting=0, versions=3)


class Quiet:
    """Traffic that went well."""

    def __init__(self) -> None:
        from collections import Counter

        self.failures: Counter[str] = Counter()


def test_the_soak_says_what_is_wrong() -> None:
    flat = [reading(60.0 * i, 10**9) for i in range(10)]
    assert faults_of(flat, verdicts_of(flat), Quiet()) == []  # type: ignore[arg-type]
    climbing = [reading(60.0 * i, 10**9 + i * 10**8) for i in range(10)]
    faults = faults_of(climbing, verdicts_of(climbing), Quiet())  # type: ignore[arg-type]
    assert faults == ["target/7 pss grows", "target/7 rss grows"]
    restarted = [*flat[:5], *(reading(60.0 * i, 10**9, pid=8, running=1) for i in range(5, 10))]
    faults = faults_of(restarted, verdicts_of(restarted), Quiet())  # type: ignore[arg-type]
    assert faults[0] == "target/7 is gone or was restarted"
    assert "1 requests run" in faults[1]
