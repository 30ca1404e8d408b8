"""The share of the learning rate, by the gate's decisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.training.learning_rate import decreased, increased


@given(st.lists(st.booleans(), max_size=60))
def test_the_share_stays_above_nothing_and_at_most_the_configured_rate(
    published: list[bool],
) -> None:
    share = 1.0
    for success in published:
        before = share
        share = increased(share) if success else decreased(share)
        assert 0.01 < share <= 1.0
        assert share >= before if success else share <= before


def test_changed_traffic_has_the_full_rate_back_after_a_few_publications() -> None:
    share = 1.0
    for _ in range(30):
        share = decreased(share)
    publications = 0
    while share < 1.0:
        share, publications = increased(share), publications + 1
    assert publications <= 7
