import math

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.actors.router.policy import Route, choose_topic, route

TOPICS = ["math", "code", "sql", "shell", "general"]


def test_the_most_probable_topic_drafts_when_it_is_sure_enough() -> None:
    assert choose_topic({"sql": 0.8, "code": 0.2}, TOPICS, 0.7) == "sql"


def test_an_unsure_prompt_goes_to_the_generalist() -> None:
    assert choose_topic({"sql": 0.6, "code": 0.4}, TOPICS, 0.7) == "general"


def test_a_topic_without_an_expert_goes_to_the_generalist() -> None:
    assert choose_topic({"sql": 0.9, "code": 0.1}, ["code"], 0.5) == "general"


def test_no_probabilities_at_all_go_to_the_generalist() -> None:
    assert choose_topic({}, TOPICS, 0.0) == "general"
    assert choose_topic({"sql": math.nan}, TOPICS, 0.0) == "general"


def test_equal_probabilities_do_not_depend_on_their_order() -> None:
    one = choose_topic({"sql": 0.5, "code": 0.5}, TOPICS, 0.5)
    assert one == choose_topic({"code": 0.5, "sql": 0.5}, TOPICS, 0.5) == "code"


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(TOPICS), st.floats(0, 1)),
    st.sets(st.sampled_from(TOPICS)),
    st.floats(0, 1),
)
def test_the_choice_is_always_an_expert_that_is_sure_or_the_generalist(
    probabilities: dict[str, float], experts: set[str], least: float
) -> None:
    chosen = choose_topic(probabilities, experts, least)
    if chosen != "general":
        assert chosen in experts
        assert probabilities[chosen] == max(probabilities.values()) >= least


OWN = {"sql": 0.99, "code": 0.99}


def test_topics_that_a_mapping_names_need_what_it_says_and_others_half() -> None:
    assert choose_topic({"sql": 0.995, "general": 0.005}, TOPICS, OWN) == "sql"
    assert choose_topic({"sql": 0.98, "code": 0.02}, TOPICS, OWN) == "general"
    assert choose_topic({"law": 0.6, "sql": 0.4}, [*TOPICS, "law"], OWN) == "law"
    assert choose_topic({"law": 0.4, "sql": 0.3, "code": 0.3}, [*TOPICS, "law"], OWN) == "general"


def test_an_added_topic_takes_no_certainty_from_those_that_the_classifier_was_made_for() -> None:
    before = {"sql": 0.999, "general": 0.001}
    after = {"law": 0.3} | {topic: 0.7 * p for topic, p in before.items()}
    assert choose_topic(before, TOPICS, OWN) == choose_topic(after, [*TOPICS, "law"], OWN) == "sql"


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from([*TOPICS, "law"]), st.floats(0, 1)),
    st.sets(st.sampled_from([*TOPICS, "law"])),
    st.dictionaries(st.sampled_from(TOPICS[:4]), st.floats(0, 1), min_size=1),
)
def test_by_a_mapping_too_the_choice_is_the_most_probable_or_the_generalist(
    probabilities: dict[str, float], experts: set[str], needed: dict[str, float]
) -> None:
    chosen = choose_topic(probabilities, experts, needed)
    if chosen != "general":
        assert chosen in experts
        assert probabilities[chosen] == max(probabilities.values())
        if chosen in needed:
            rivals = sum(probabilities.get(name, 0.0) for name in {"general", *needed})
            assert probabilities[chosen] >= needed[chosen] * rivals * (1 - 1e-12)
        else:
            assert probabilities[chosen] >= 0.5


SURE = {"sql": 0.8, "code": 0.1, "general": 0.1}


def weights(topic: str, **given: float) -> dict[str, dict[str, float]]:
    rest = (1.0 - sum(given.values())) / (len(TOPICS) - len(given))
    return {topic: {name: given.get(name, rest) for name in TOPICS}}


def test_without_measurements_the_topics_expert_drafts() -> None:
    for nothing in (None, {}, weights("math", general=1.0)):
        assert route(SURE, TOPICS, 0.5, nothing) == Route("sql", "sql")


def test_the_heaviest_expert_drafts_and_the_topic_stays_the_routers() -> None:
    assert route(SURE, TOPICS, 0.5, weights("sql", general=0.9)) == Route("sql", "general")
    assert route(SURE, TOPICS, 0.5, weights("sql", code=0.9)) == Route("sql", "code")
    assert route(SURE, TOPICS, 0.5, weights("sql", sql=0.9)) == Route("sql", "sql")


def test_an_expert_that_is_no_better_than_the_generalist_does_not_draft() -> None:
    even = {"sql": {"sql": 0.5, "general": 0.5}}
    assert route({"sql": 1.0}, TOPICS, 0.5, even) == Route("sql", "general")


def test_the_doubt_of_the_classifier_speaks_for_the_generalist() -> None:
    measured = weights("sql", sql=0.6, general=0.3)
    assert route({"sql": 1.0}, TOPICS, 0.5, measured).draft == "sql"
    assert route({"sql": 0.6, "general": 0.4}, TOPICS, 0.5, measured).draft == "general"
    assert route({"sql": 0.4, "code": 0.6}, TOPICS, 0.7, measured) == Route("general", "general")


def test_every_topics_weights_count_by_its_probability() -> None:
    both = weights("sql", sql=0.5, shell=0.5) | weights("code", shell=1.0)
    assert route({"sql": 0.6, "code": 0.4}, TOPICS, 0.5, both) == Route("sql", "shell")


def test_weights_of_experts_that_are_gone_or_broken_count_for_nothing() -> None:
    odd = {"sql": {"poetry": 0.9, "math": math.nan, "sql": 0.1, "general": 0.05}}
    assert route({"sql": 1.0}, TOPICS, 0.5, odd) == Route("sql", "sql")


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(TOPICS), st.floats(allow_nan=True)),
    st.sets(st.sampled_from(TOPICS)),
    st.floats(0, 1),
    st.dictionaries(
        st.sampled_from(TOPICS), st.dictionaries(st.sampled_from(TOPICS), st.floats(0, 1))
    ),
)
def test_whatever_is_measured_one_of_the_experts_drafts_and_the_topic_is_the_rules(
    probabilities: dict[str, float],
    experts: set[str],
    least: float,
    measured: dict[str, dict[str, float]],
) -> None:
    found = route(probabilities, experts, least, measured)
    assert found.topic == choose_topic(probabilities, experts, least)
    assert found.draft in experts | {"general"}
    assert found == route(dict(reversed(probabilities.items())), experts, least, measured)
