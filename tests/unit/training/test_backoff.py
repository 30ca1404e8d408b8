"""Asking for leave: often at first, seldom where it has long been refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.training.backoff import Patience, pause_s
from paceline.actors.training.progress import Stopped


def test_a_short_gap_is_waited_for_closely_and_a_busy_hour_costs_half_the_questions() -> None:
    assert pause_s(0.0, 0.02) == pause_s(0.3, 0.02) == 0.02
    assert pause_s(0.5, 0.02) == 0.03125
    assert pause_s(3600.0, 0.02) == 0.04
    assert pause_s(3600.0, 2.0) == 2.0


@given(st.floats(0.0, 1e5), st.floats(1e-3, 1.0))
def test_what_is_missed_of_a_gap_is_a_sixteenth_of_the_waiting_at_most(
    waited: float, poll: float
) -> None:
    assert poll <= pause_s(waited, poll) <= max(poll, waited / 16)


def test_it_asks_until_it_is_told_yes() -> None:
    slept: list[float] = []
    answers = iter([False] * 200 + [True])
    Patience(0.02, sleep=slept.append, stopped=lambda: False).until(lambda: next(answers))
    assert len(slept) == 200
    assert slept == sorted(slept)
    assert next(answers, None) is None
    again: list[float] = []
    answers = iter([False, True])
    Patience(0.02, sleep=again.append, stopped=lambda: False).until(lambda: next(answers))
    assert again == [0.02]


@pytest.mark.parametrize("granted", [True, False])
def test_it_ends_when_told_to(granted: bool) -> None:
    patience = Patience(0.02, sleep=lambda _: None, stopped=lambda: True)
    with pytest.raises(Stopped):
        patience.until(lambda: granted)
