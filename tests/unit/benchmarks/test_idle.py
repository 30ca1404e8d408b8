"""What the idle benchmark reckons: gaps, use of them, yields, and pairs of requests."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from clients import Outcome, Planned, Reply, outcome_of
from idle import (
    OFF,
    ON,
    CpuClock,
    CpuSeries,
    block_of,
    changed,
    compared,
    decided_topics,
    faults_of,
    gaps,
    goals,
    idleness,
    plan,
    yields,
)

from paceline.deploy.demo.prompts import TOPICS


def trainer(*spans: tuple[float, float], until: float = 20.0) -> CpuSeries:
    """A process that computes on one core in these spans, read every 5 ms."""
    times = np.arange(0.0, until, 0.005)
    seconds = sum(np.clip(times - begin, 0.0, end - begin) for begin, end in spans)
    return CpuSeries(times, seconds)


def outcome(due_s: float, took_s: float, **more: Any) -> Outcome:
    reply = Reply(last_at=due_s, token_ids=[1, 2, 3], first_tokens=1)
    reply.token_times = [due_s + took_s / 2]
    reply.last_at = due_s + took_s
    made = outcome_of(Planned(due_s, "sql", 0, {}), due_s, 0.0, reply)
    return replace(made, **more)


def test_gaps_are_where_nothing_is_under_way_for_long() -> None:
    busy = [(0.0, 1.0), (0.5, 2.0), (2.1, 3.0), (4.0, 4.5), (2.2, 2.5)]
    assert gaps(busy, 0.2) == [(3.0, 4.0)]
    assert gaps(busy, 0.0) == [(2.0, 2.1), (3.0, 4.0)]
    assert gaps([], 0.2) == []


def test_use_and_yield_are_read_from_the_cpu_time() -> None:
    idle = [(1.0, 3.0), (5.0, 6.0), (8.0, 9.0)]
    series = trainer((1.1, 3.03), (5.5, 5.9))  # it has stopped by itself before the second arrival
    assert series.spent(idle) == pytest.approx(1.9 + 0.4)
    assert yields(series, idle) == [pytest.approx(0.03, abs=0.011)]


def test_one_that_does_not_yield_counts_as_that() -> None:
    assert yields(trainer((1.0, 9.0)), [(1.5, 2.0)]) == [2.0]


def test_the_clock_reads_the_cpu_time_of_a_process() -> None:
    clock = CpuClock(os.getpid(), every_s=0.002)
    began, spent = time.monotonic(), time.process_time()
    while time.process_time() - spent < 0.1:
        sum(range(1000))
    ended, spent = time.monotonic(), time.process_time() - spent
    assert clock.lately() > 0.0
    series = clock.stop()
    assert series.spent([(began, ended)]) == pytest.approx(spent, rel=0.2)


def test_requests_are_compared_with_themselves() -> None:
    on = [outcome(i, 0.2 + 0.01 * i) for i in range(20)]
    off = [outcome(i, 0.1 + 0.005 * i) for i in range(20)]
    off[3] = replace(off[3], error="lost")
    blocks = [block_of(on, 0, ON, 0.0), block_of(off, 0, OFF, 50.0)]
    blocks.append(block_of([outcome(0, 9.0)], 1, ON, 99.0))  # its other side has not run
    figures = compared(pd.concat(blocks), "tpot_s")
    assert figures["requests"] == 19
    for q in ("p50", "p99"):
        assert figures[q]["ratio"]["value"] == pytest.approx(2.0)
        assert figures[q]["ratio"]["low"] is None  # of one pair
        difference = figures[q]["on"]["value"] - figures[q]["off"]["value"]
        assert figures[q]["difference"]["value"] == pytest.approx(difference)
    assert compared(blocks[2], "tpot_s") == {"requests": 0}


def test_the_interval_is_over_pairs_of_blocks_however_many_requests_they_have() -> None:
    blocks = []
    for pair, pace in enumerate((0.9, 1.0, 1.1)):
        blocks.append(block_of([outcome(i, pace) for i in range(50)], pair, ON, 0.0))
        blocks.append(block_of([outcome(i, 1.0) for i in range(50)], pair, OFF, 0.0))
    ratio = compared(pd.concat(blocks), "tpot_s")["p50"]["ratio"]
    assert ratio["value"] == pytest.approx(1.0)
    reach = 4.302653 * 0.1 / 3**0.5  # t(0.975, 2) times the standard error
    assert (ratio["low"], ratio["high"]) == (pytest.approx(1 - reach), pytest.approx(1 + reach))


def test_idleness_is_of_the_blocks_with_trainers_alone() -> None:
    sent = [outcome(0.0, 1.0), outcome(3.0, 1.0)]
    blocks = pd.concat([block_of(sent, 0, ON, 0.0), block_of(sent, 0, OFF, 10.0)])
    found = idleness(blocks, trainer((1.1, 3.05)))
    assert (found["seconds"], found["idle_s"], found["gaps"]) == (4.0, 2.0, 1)
    assert found["used_share"] == pytest.approx(0.95)
    assert found["yield_max_ms"] == pytest.approx(50, abs=11)
    assert found["trained_while_serving_share"] == pytest.approx(0.05 / 2.0)


def test_what_is_to_be_reached_is_judged_and_what_was_not_measured_is_not() -> None:
    idle = {"used_share": 0.75, "yield_p99_ms": 39.0}
    tpot = {"p50": {"ratio": {"value": 1.01}}, "p99": {"ratio": {"value": 1.2}}}
    judged = goals({"tpot": tpot, "ttft": {"requests": 0}, "idle": idle})
    assert [goal["met"] for goal in judged] == [True, False, None, False, True]


def test_both_sides_of_a_pair_get_the_same_requests_and_others_do_not() -> None:
    first = plan(50, 2.0, 16, seed=3)
    assert first == plan(50, 2.0, 16, seed=3)
    assert first != plan(50, 2.0, 16, seed=4)
    assert {planned.topic for planned in first} == {"math", "code", "sql", "shell"}
    dues = [planned.due_s for planned in first]
    assert dues == sorted(dues)
    assert 10 < dues[-1] < 50  # 49 gaps of half a second


def test_a_topic_is_warm_once_the_gate_and_not_traffic_alone_has_had_its_say() -> None:
    noted = {"sql": "drift", "math": "rejected", "code": "published", "elsewhere": "published"}
    history = [{"topic": topic, "outcome": outcome} for topic, outcome in noted.items()]
    assert decided_topics(history) == {"math", "code"}


def test_failures_and_changed_answers_are_named() -> None:
    on = [outcome(0, 1.0, answer="a"), outcome(1, 1.0, error="gone")]
    off = [outcome(0, 1.0, answer="b"), outcome(1, 1.0, answer="c")]
    blocks = pd.concat([block_of(on, 0, ON, 0.0), block_of(off, 0, OFF, 9.0)])
    assert changed(blocks) == 1
    faults = faults_of(blocks, 2, TOPICS[1:], lives=False)
    assert faults == [
        "1 requests failed, the first: gone",
        "1 answers differ between the sides of their pair",
        f"not warm: nothing was decided on {TOPICS[0]}",
        "drafts failed in 2 rounds",
        "the trainer died",
    ]
    well = block_of([outcome(0, 1.0)], 0, ON, 0.0)
    assert faults_of(well, 0, TOPICS, lives=True) == []
