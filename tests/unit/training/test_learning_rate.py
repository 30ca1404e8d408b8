"""The share of the learning rate, by what the gate finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.training.learning_rate import Stride


@given(st.lists(st.booleans(), max_size=60))
def test_steps_stay_above_nothing_and_at_most_the_configured_rate(published: list[bool]) -> None:
    stride = Stride()
    for success in published:
        before = stride.share
        stride = stride.longer() if success else stride.shorter()
        assert 0.01 < stride.share <= 1.0
        assert stride.share >= before if success else stride.share <= before


def test_traffic_that_changes_has_its_steps_back_after_a_few_publications() -> None:
    stride = Stride()
    for _ in range(30):
        stride = stride.shorter()
    publications = 0
    while stride.share < 1.0:
        stride, publications = stride.longer(), publications + 1
    assert publications <= 7
