"""The weights of experts: what Hedge promises, whatever the gains."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.actors.router.hedge import Hedge, HedgeSettings, prior, updated

EXPERTS = ("general", "math", "code", "sql", "shell")
GAINS = st.dictionaries(
    st.sampled_from(EXPERTS), st.floats(0.0, 1.0), min_size=len(EXPERTS), max_size=len(EXPERTS)
)
PARTIAL = st.dictionaries(
    st.sampled_from([*EXPERTS, "nobody"]), st.floats(allow_nan=True, allow_infinity=True)
)
SETTINGS = st.builds(
    HedgeSettings,
    rate=st.floats(0.05, 4.0),
    discount=st.floats(0.5, 0.999),
    own=st.floats(0.1, 0.6),
    general=st.floats(0.1, 0.39),
)


@settings(deadline=None)
@given(st.lists(GAINS, max_size=60), SETTINGS)
def test_the_discounted_regret_against_every_expert_is_bounded(
    rows: list[dict[str, float]], how: HedgeSettings
) -> None:
    """ln(1/prior)/rate + rate/8 per (discounted) row, as the module says."""
    start = prior("sql", EXPERTS, how)
    weights, ours, counted = dict(start), 0.0, 0.0
    theirs = dict.fromkeys(EXPERTS, 0.0)
    for gains in rows:
        ours = how.discount * ours + sum(weights[e] * gains[e] for e in EXPERTS)
        theirs = {e: how.discount * theirs[e] + gains[e] for e in EXPERTS}
        counted = how.discount * counted + 1.0
        weights = updated(weights, start, gains, how)
    for expert in EXPERTS:
        bound = math.log(1 / start[expert]) / how.rate + how.rate / 8 * counted
        assert theirs[expert] - ours <= bound + 1e-9


@settings(deadline=None)
@given(st.lists(PARTIAL, max_size=40), SETTINGS)
def test_weights_are_a_distribution_whatever_is_measured(
    rows: list[dict[str, float]], how: HedgeSettings
) -> None:
    start = prior("sql", EXPERTS, how)
    weights = dict(start)
    for gains in rows:
        weights = updated(weights, start, gains, how)
    assert set(weights) == set(EXPERTS)
    assert all(math.isfinite(w) and w > 0 for w in weights.values())
    assert math.fsum(weights.values()) == pytest.approx(1)


@settings(deadline=None)
@given(st.lists(GAINS, max_size=20), st.permutations(EXPERTS))
def test_the_order_of_the_experts_does_not_matter(
    rows: list[dict[str, float]], order: list[str]
) -> None:
    one, other = Hedge(EXPERTS), Hedge(order)
    for number, gains in enumerate(rows):
        for hedge in (one, other):
            hedge.add_row("sql", str(number))
            for expert in hedge.versions:
                hedge.add_gain("sql", str(number), expert, gains[expert])
    assert other.weights("sql") == pytest.approx(one.weights("sql"))


@settings(deadline=None)
@given(st.lists(GAINS, min_size=1, max_size=20), st.sampled_from(EXPERTS))
def test_a_new_version_is_back_at_the_prior_and_the_others_keep_their_proportions(
    rows: list[dict[str, float]], swapped: str
) -> None:
    hedge, without = Hedge(EXPERTS), Hedge(EXPERTS)
    for number, gains in enumerate(rows):
        hedge.add_row("sql", str(number))
        without.add_row("sql", str(number))
        for expert, gain in gains.items():
            hedge.add_gain("sql", str(number), expert, gain)
            if expert != swapped:
                without.add_gain("sql", str(number), expert, gain)
    assert hedge.set_version(swapped, 1)
    assert not hedge.set_version(swapped, 1)
    weights = hedge.weights("sql")
    assert weights[swapped] == pytest.approx(prior("sql", EXPERTS, hedge.settings)[swapped])
    assert weights == pytest.approx(without.weights("sql"))


@settings(deadline=None)
@given(st.lists(GAINS, min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_gains_may_come_late_and_in_any_order(
    rows: list[dict[str, float]], rng: random.Random
) -> None:
    in_order, late = Hedge(EXPERTS), Hedge(EXPERTS)
    cells = [(str(n), e, gain) for n, gains in enumerate(rows) for e, gain in gains.items()]
    for hedge in (in_order, late):
        for number in range(len(rows)):
            hedge.add_row("sql", str(number))
        for key, expert, gain in cells:
            hedge.add_gain("sql", key, expert, gain)
        rng.shuffle(cells)
    assert late.weights("sql") == in_order.weights("sql")


def test_every_weight_stays_positive_for_a_hundred_thousand_rows() -> None:
    how = HedgeSettings(rate=8.0, discount=0.99)
    start = prior("sql", EXPERTS, how)
    weights = dict(start)
    always = {"sql": 1.0, "general": 0.0, "math": 0.0, "code": 0.5}  # shell is never scored
    pairs = [{"sql": 1.0, "math": 0.0}, {"math": 1.0, "code": 0.0}, {"code": 1.0, "general": 0.0}]
    for gains in [always, *pairs] * 25_000:
        weights = updated(weights, start, gains, how)
    assert all(math.isfinite(w) and w > 0 for w in weights.values())
    assert weights["shell"] == pytest.approx(start["shell"])
    for _ in range(200):  # and it can still change its mind
        weights = updated(weights, start, {"sql": 0.0, "general": 1.0, "math": 0.5}, how)
    assert weights["general"] > 0.5 > weights["sql"]


def test_a_few_requests_lower_a_bad_expert_and_keep_a_good_one() -> None:
    bad, good = Hedge(EXPERTS), Hedge(EXPERTS)
    for number in range(6):
        for hedge, gain in ((bad, 0.2), (good, 0.55)):
            hedge.add_row("sql", str(number))
            hedge.add_gain("sql", str(number), "sql", gain)
            hedge.add_gain("sql", str(number), "general", 0.5)
    assert bad.weights("sql")["general"] > bad.weights("sql")["sql"]
    assert good.weights("sql")["sql"] > good.weights("sql")["general"]
    assert bad.weights("math") == prior("math", EXPERTS, bad.settings)


def test_the_prior_favours_the_topics_own_expert_mildly() -> None:
    how = HedgeSettings()
    weights = prior("sql", EXPERTS, how)
    assert weights["sql"] > weights["general"] > weights["math"] == weights["code"] > 0
    assert max(prior("general", EXPERTS, how).items(), key=lambda i: i[1])[0] == "general"
    assert max(prior("poetry", EXPERTS, how).items(), key=lambda i: i[1])[0] == "general"
    assert prior("general", ("general",), how) == {"general": 1.0}


def test_only_the_last_rows_count_and_those_that_went_are_named() -> None:
    hedge = Hedge(EXPERTS, HedgeSettings(window=2))
    gone = [hedge.add_row("sql", key) for key in "abc"]
    assert gone == [[], [], ["a"]]
    hedge.add_gain("sql", "a", "sql", 0.0)
    hedge.add_gain("sql", "a", "general", 1.0)
    assert hedge.weights("sql") == prior("sql", EXPERTS, hedge.settings)
    hedge.remove_rows(lambda topic, key: (topic, key) == ("sql", "b"))
    assert hedge.table().rows["sql"] == 1


def filled() -> Hedge:
    hedge = Hedge(EXPERTS)
    hedge.set_version("sql", 3)
    for number, gain in enumerate([0.9, 0.1, 0.4]):
        hedge.add_row("sql", str(number))
        hedge.add_gain("sql", str(number), "sql", gain)
        hedge.add_gain("sql", str(number), "general", 0.5)
        hedge.add_gain("sql", str(number), "code", math.nan)
    return hedge


def test_the_state_travels_as_json() -> None:
    hedge, again = filled(), Hedge(EXPERTS)
    again.restore(json.loads(json.dumps(hedge.export())))
    assert again.weights("sql") == hedge.weights("sql") != Hedge(EXPERTS).weights("sql")
    assert again.versions["sql"] == 3
    fewer = Hedge(("general", "math"))
    fewer.restore(hedge.export())
    assert fewer.weights("math") == Hedge(("general", "math")).weights("math")


@pytest.mark.parametrize(
    "data", [None, [], {}, {"state": 2}, {"state": 1, "versions": [], "rows": {}}]
)
def test_what_is_no_state_changes_nothing(data: object) -> None:
    hedge = filled()
    before = hedge.export()
    with pytest.raises(ValueError, match="hedge"):
        hedge.restore(data)
    assert hedge.export() == before


def test_the_table_has_means_and_rows_of_compared_topics() -> None:
    table = filled().table()
    assert set(table.weights) == {"sql"}
    assert table.acceptance["sql"] == pytest.approx({"sql": 1.4 / 3, "general": 0.5})
    assert table.rows == {"general": 0, "math": 0, "code": 0, "sql": 3, "shell": 0}
    json.dumps(dataclasses.asdict(table))
