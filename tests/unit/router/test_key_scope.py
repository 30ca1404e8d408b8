"""Keys apart: whose experts may draft for whom."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.general import GENERAL
from paceline.actors.router.hedge import Hedge
from paceline.actors.router.key_scope import (
    experts_for,
    key_of,
    key_route,
    key_topic,
    may_draft,
    topic_of,
)
from paceline.actors.router.policy import Route, route

KEYS, TOPICS = ("acme", "beta"), ("general", "sql", "code")
EXPERTS = (GENERAL, *(key_topic(key, topic) for key in KEYS for topic in TOPICS))
SURE = {"sql": 0.8, "code": 0.1, "general": 0.1}


def test_a_name_gives_its_key_and_its_topic_back() -> None:
    assert [(key_of(name), topic_of(name)) for name in ("acme.sql", "sql", "general")] == [
        ("acme", "sql"),
        ("", "sql"),
        ("", "general"),
    ]


def test_only_own_experts_and_the_one_that_never_learns_may_draft() -> None:
    assert [e for e in EXPERTS if may_draft(e, "acme.sql")] == experts_for("acme", EXPERTS)
    assert experts_for("acme", EXPERTS) == ["general", "acme.general", "acme.sql", "acme.code"]
    assert experts_for("", EXPERTS) == ["general"]
    assert all(may_draft(e, topic) for e in TOPICS for topic in TOPICS)  # without a scope by key


@pytest.mark.parametrize("confidence", [0.5, {"sql": 0.5, "code": 0.5}])
def test_a_key_s_route_is_the_one_without_keys_among_its_own(confidence: Any) -> None:
    for probabilities in (SURE, {"code": 0.9, "general": 0.1}):
        plain = route(probabilities, TOPICS, confidence)
        found = key_route("acme", probabilities, EXPERTS, confidence)
        assert found == Route(key_topic("acme", plain.topic), key_topic("acme", plain.draft))


def test_an_uncertain_prompt_is_the_key_s_own_general_s() -> None:
    for probabilities in ({}, {"sql": 0.4, "code": 0.4, "general": 0.2}, {"poetry": 1.0}):
        found = key_route("acme", probabilities, EXPERTS, 0.5)
        assert found == Route("acme.general", "acme.general")


def test_the_draft_that_never_learns_is_the_floor_of_a_topic() -> None:
    measured = {"acme.sql": {"general": 0.7, "acme.sql": 0.2, "acme.code": 0.1}}
    assert key_route("acme", SURE, EXPERTS, 0.5, measured) == Route("acme.sql", "general")
    assert key_route("beta", SURE, EXPERTS, 0.5, measured) == Route("beta.sql", "beta.sql")


@given(
    st.dictionaries(st.sampled_from((*TOPICS, "poetry")), st.floats(allow_nan=True)),
    st.sampled_from(KEYS),
    st.floats(0, 1),
    st.dictionaries(
        st.sampled_from(EXPERTS), st.dictionaries(st.sampled_from(EXPERTS), st.floats(0, 1))
    ),
)
def test_whatever_is_measured_no_other_key_s_expert_drafts(
    probabilities: dict[str, float],
    key: str,
    least: float,
    measured: dict[str, dict[str, float]],
) -> None:
    found = key_route(key, probabilities, EXPERTS, least, measured)
    assert key_of(found.topic) == key
    assert found.draft in EXPERTS
    assert may_draft(found.draft, found.topic)


def test_hedge_weighs_no_other_key_s_expert() -> None:
    hedge = Hedge(EXPERTS)
    hedge.add_row("acme.sql", "r")
    for expert in EXPERTS:
        hedge.add_gain("acme.sql", "r", expert, 1.0 if expert == "beta.sql" else 0.1)
    weights = hedge.weights("acme.sql")
    assert sorted(weights) == sorted(experts_for("acme", EXPERTS))
    assert sum(weights.values()) == pytest.approx(1.0)
