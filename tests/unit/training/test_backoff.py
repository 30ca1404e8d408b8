"""Back-off, and the polls for a permit that it paces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.backoff import Backoff, RoundBackoff
from paceline.actors.training.progress import Stopped, wait_for_permit


def test_delays_double_up_to_a_limit_until_a_success() -> None:
    backoff = Backoff(1.0, 5.0)
    assert backoff.delay == 0.0
    assert [backoff.fail() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert backoff.delay == 5.0
    backoff.reset()
    assert backoff.fail() == 1.0
    backoff.failures = 10**6
    assert backoff.fail() == 5.0, "the exponent is bounded because a float is"


def rounds_between(backoff: RoundBackoff, most: int | None = None) -> int:
    """Rounds that are left out until the next try, which is in vain."""
    left_out = 0
    while backoff.leaves_out(most):
        left_out += 1
    backoff.fail()
    return left_out


def test_more_and_more_rounds_are_left_out_until_a_success() -> None:
    backoff = RoundBackoff(5)
    assert [rounds_between(backoff) for _ in range(5)] == [0, 1, 2, 4, 5]
    assert [rounds_between(backoff, most) for most in (3, 0)] == [3, 0]
    backoff.reset()
    assert [rounds_between(backoff) for _ in range(3)] == [0, 1, 2]


def polls(refused: int, poll_s: float) -> list[float]:
    """The delays between polls of which so many are refused."""
    slept: list[float] = []
    answers = iter([False] * refused + [True])
    waits: list[float] = []

    def until_idle() -> None:
        waits.append(len(slept))

    wait_for_permit(
        lambda: next(answers), until_idle, poll_s, sleep=slept.append, stopped=lambda: False
    )
    assert next(answers, None) is None
    assert waits == [number + 1 for number in range(refused)], "the last before it asks again"
    return slept


def test_a_short_gap_is_waited_for_closely_and_a_busy_hour_costs_a_fifth_of_the_polls() -> None:
    assert polls(1, 0.02) == [0.02]
    assert polls(3, 0.02)[-1] < 0.023
    assert polls(200, 0.02)[-1] == 0.1
    assert set(polls(200, 2.0)) == {2.0}


@given(st.integers(1, 300), st.floats(1e-3, 1.0))
def test_what_is_missed_of_a_gap_is_a_sixteenth_of_the_wait_beyond_a_poll(
    refused: int, poll_s: float
) -> None:
    slept = polls(refused, poll_s)
    assert slept == sorted(slept)
    for number, delay in enumerate(slept):
        assert poll_s <= delay <= (poll_s + sum(slept[:number]) / 16) * (1 + 1e-9)


@pytest.mark.parametrize("granted", [True, False])
def test_the_wait_ends_when_the_trainer_does(granted: bool) -> None:
    with pytest.raises(Stopped):
        wait_for_permit(
            lambda: granted, pytest.fail, 0.02, sleep=lambda _: None, stopped=lambda: True
        )
