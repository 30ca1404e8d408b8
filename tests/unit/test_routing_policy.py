import math

from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.routing.policy import choose

TOPICS = ["math", "code", "sql", "shell", "general"]


def test_the_likeliest_topic_drafts_when_it_is_sure_enough() -> None:
    assert choose({"sql": 0.8, "code": 0.2}, TOPICS, 0.7) == "sql"


def test_an_unsure_prompt_goes_to_the_generalist() -> None:
    assert choose({"sql": 0.6, "code": 0.4}, TOPICS, 0.7) == "general"


def test_a_topic_without_an_expert_goes_to_the_generalist() -> None:
    assert choose({"sql": 0.9, "code": 0.1}, ["code"], 0.5) == "general"


def test_no_probabilities_at_all_go_to_the_generalist() -> None:
    assert choose({}, TOPICS, 0.0) == "general"
    assert choose({"sql": math.nan}, TOPICS, 0.0) == "general"


def test_equal_probabilities_do_not_depend_on_their_order() -> None:
    one = choose({"sql": 0.5, "code": 0.5}, TOPICS, 0.5)
    assert one == choose({"code": 0.5, "sql": 0.5}, TOPICS, 0.5) == "code"


@given(
    st.dictionaries(st.sampled_from(TOPICS), st.floats(0, 1)),
    st.sets(st.sampled_from(TOPICS)),
    st.floats(0, 1),
)
def test_the_choice_is_always_an_expert_that_is_sure_or_the_generalist(
    probabilities: dict[str, float], experts: set[str], least: float
) -> None:
    chosen = choose(probabilities, experts, least)
    if chosen != "general":
        assert chosen in experts
        assert probabilities[chosen] == max(probabilities.values()) >= least
