"""The routing benchmark's own arithmetic: rounds replayed, policies, groups, intervals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import engine_of, request, run, served, tokens_of
from online import routes
from online.routes import Case, Group, Tally
from online.rows import Question
from online.serving import Answer
from tiny_models import tiny_llama
from training_records import training_record

from paceline.actors.replay.record import is_held_out

GOOD, BAD = Tally(4, 16, 12, 0.9), Tally(10, 40, 2, 0.1)


def case(key: str, topic: str, tallies: dict[str, Tally], sure: float = 0.9) -> Case:
    rest = (1.0 - sure) / 2
    thoughts = {"sql": rest, "math": rest, "general": rest} | {topic: sure}
    return Case(key, topic, thoughts, tallies)


def test_rounds_are_replayed_from_agreement() -> None:
    yes, no = True, False
    assert routes.replayed([], 4, 9) == Tally(0, 0, 0, 0.0)
    assert routes.replayed([yes], 4, 9) == Tally(1, 4, 1, 1.0)
    # a round of 4 accepts 2 and corrects, one of 2 accepts both: a third would be the 7th token
    found = routes.replayed([yes, yes, no, yes, yes, no], 4, 6)
    assert found == Tally(rounds=2, drafted=4 + 2, accepted=4, gain=pytest.approx(4 / 6))
    # the last token that is allowed is not drafted for
    assert routes.replayed([no, no], 4, 2) == Tally(1, 1, 0, 0.0)
    # an answer that ended by itself: nothing is accepted beyond its end
    assert routes.replayed([yes, yes], 4, 90) == Tally(1, 4, 2, 1.0)


def noisy(model: Any) -> Any:
    """A copy that agrees now and then."""
    twin = tiny_llama(1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for own, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            own.copy_(theirs + 0.05 * torch.randn(own.shape, generator=generator))
    return twin


@torch.inference_mode()
def test_replayed_rounds_are_those_of_the_engine() -> None:
    """Teacher-forced agreement decides greedy speculation: the same counts, exactly."""
    target = tiny_llama(1)
    draft = noisy(target)
    stock = noisy(target)
    engine = engine_of(served(target), [{"a": served(draft)}], k=3)
    prompts = [(5, 9, 2, 7), (11, 3, 4), (8, 8, 1, 6, 2), (40, 41), (99, 3, 250)]
    outputs = run(engine, [request(str(i), prompt) for i, prompt in enumerate(prompts)])
    total = 0
    for number, prompt in enumerate(prompts):
        own = outputs[str(number)]
        tokens, stats = tokens_of(own), own[-1].chunk.speculative
        assert stats is not None
        logits = stock(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        agrees = [a == b for a, b in zip(logits.argmax(-1).tolist(), tokens, strict=True)]
        found = routes.replayed(agrees, 3, 20)
        counts = stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens
        assert (found.rounds, found.drafted, found.accepted) == counts
        total += found.accepted
    assert total > 3  # else nothing has been compared


def test_oracles_and_rules_pick_what_they_say() -> None:
    experts = ("general", "math", "sql")
    tallies = {"general": BAD, "math": BAD, "sql": GOOD}
    wrong = case("x", "math", tallies)  # the classifier errs: sql would be best
    unsure = case("y", "math", tallies, sure=0.4)
    found = routes.policies_of(experts, 0.5, 0.0)
    picks = {name: (policy(wrong), policy(unsure)) for name, policy in found.items()}
    assert picks == {
        "rule": ("math", "general"),
        "measured": ("math", "general"),
        "general": ("general", "general"),
        "label": ("math", "math"),
        "best": ("sql", "sql"),
    }
    assert routes.policies_of(("general", "sql"), 0.5, 0.0)["label"](wrong) == "general"
    assert routes.best(case("z", "sql", dict.fromkeys(experts, BAD))) == "general"  # the first


def test_the_measured_policy_leaves_an_expert_that_is_worse_than_general() -> None:
    tallies = {"general": GOOD, "math": BAD, "sql": BAD}
    stream = [case(str(i), "sql", tallies) for i in range(60)]
    policy = routes.Measured(("general", "math", "sql"), 0.5, sample_share=0.5)
    picks = [policy(one) for one in stream]
    assert picks[0] == "sql"
    assert set(picks[-20:]) == {"general"}
    blind = routes.Measured(("general", "math", "sql"), 0.5, sample_share=0.0)
    assert {blind(one) for one in stream} == {"sql"}


def test_translations_of_an_item_have_its_id_in_common() -> None:
    rows = [
        {"id": "tldr-en-common/pass", "lang": "en"},
        {"id": "tldr-de-common/pass", "lang": "de"},
        {"id": "tldr-de-common/de-tool", "lang": "de"},
    ]
    first, second, other = map(routes.item_of, rows)
    assert first == second != other


def test_only_prompts_that_no_expert_learns_from_are_sampled() -> None:
    records = [training_record(i) for i in range(2000)]
    answers = [Answer(i, r.request_id, 1, 4, 2, 12, 0.1, r) for i, r in enumerate(records)]
    stream = Group(answers, ["sql"] * 2000, [{"sql": float(i)} for i in range(2000)])
    found = routes.sample(stream, 0.4)
    assert all(is_held_out(s.record.prompt_token_ids, 0.4) for s in found.answers)
    assert [p["sql"] for p in found.probabilities] == [s.number for s in found.answers]
    assert 0.5 < len(found.answers) / (2000 * routes.SAMPLE_SHARE) < 2.0


def test_what_was_sampled_from_the_stream_is_not_sampled_again() -> None:
    tallies = {"general": GOOD, "math": BAD, "sql": BAD, "code": BAD, "shell": BAD}
    group = {"topic sql": judged(tallies, 3)}
    arms = {
        "single": {"groups": {"topic sql": judged({"general": BAD, "frozen": BAD}, 3)}},
        "experts": {"groups": group, "sampled": judged(tallies, 40)},
    }
    _, counts = routes.chosen(arms, 0.5, 0.0, 0)
    assert counts["rule"]["topic sql"] == {"sql": 3}
    assert counts["measured"]["topic sql"] == {"general": 3}


def test_translations_of_an_item_are_resampled_together() -> None:
    groups = {
        f"lang {language} tldr": {"keys": [f"tldr-{language}-common/{i}" for i in range(6)]}
        for language in ("de", "en", "fr")
    }
    items = routes.items_of(groups)
    easy = [Tally(4, 16, 4 * (i % 2), 0.0) for i in range(6)]  # an item is alike in all languages
    found = {0: {"single": dict.fromkeys(groups, easy)}}
    rows = {row["group"]: row for row in routes.rows_of(found, items)}
    whole, german = rows["languages"], rows["lang de"]
    assert (whole["prompts"], whole["items"]) == (12, 6)  # English is apart
    assert (german["prompts"], german["items"]) == (6, 6)
    # twice the same tells no more than once
    assert whole["mean_acceptance_length"] == german["mean_acceptance_length"]


def test_languages_are_asked_what_english_has_too() -> None:
    def questions(language: str, *items: str) -> dict[str, Question]:
        return {item: Question(f"{language}/{item}", language, (1,)) for item in items}

    fitting = {
        "en": questions("en", "a", "b", "c", "d"),
        "de": questions("de", "x", "b", "a", "d"),
        "ru": questions("ru", "c", "y"),
        "zh": questions("zh", "z"),
    }
    found = {
        language: [question.key for question in own]
        for language, own in routes.parallel(fitting, 2).items()
    }
    assert found == {"en": ["en/a", "en/b", "en/c"], "de": ["de/b", "de/a"], "ru": ["ru/c"]}


def judged(tallies: dict[str, Tally], count: int) -> dict[str, Any]:
    return {
        "keys": [str(i) for i in range(count)],
        "labels": ["sql"] * count,
        "probabilities": [{"sql": 0.9, "general": 0.1}] * count,
        "tallies": {
            name: [[t.rounds, t.drafted, t.accepted, t.gain]] * count for name, t in tallies.items()
        },
    }


def test_the_report_sums_over_seeds_and_compares_with_the_single_draft() -> None:
    experts = {"general": BAD, "math": BAD, "code": BAD, "shell": BAD, "sql": GOOD}
    single = {"general": BAD, "frozen": BAD}
    arms = {
        "single": {"groups": {"topic sql": judged(single, 5)}},
        "experts": {
            "groups": {"topic sql": judged(experts, 5)},
            "sampled": judged(experts, 2),
        },
    }
    least = {"sql": 0.75, "math": 0.75}
    judged_by = {seed: routes.chosen(arms, least, 1.0, seed) for seed in (0, 1)}
    items = routes.items_of(arms["single"]["groups"])
    rows = routes.rows_of({seed: found for seed, (found, _) in judged_by.items()}, items)
    assert judged_by[0][1]["rule"] == {"topic sql": {"sql": 5}}
    found = {(row["group"], row["policy"]): row for row in rows}
    assert {group for group, _ in found} == {"mixed", "topic sql"}
    rule = found["mixed", "rule"]
    assert rule["mean_acceptance_length"]["value"] == pytest.approx(4.0)
    assert rule["acceptance_rate"]["value"] == pytest.approx(0.75)
    assert rule["over_single"]["value"] == pytest.approx(4.0 - 1.2)
    assert rule["over_single"]["low"] == pytest.approx(4.0 - 1.2)  # all prompts alike
    assert len(rule["by_seed"]) == 2
    assert found["mixed", "general"]["mean_acceptance_length"]["value"] == pytest.approx(1.2)
