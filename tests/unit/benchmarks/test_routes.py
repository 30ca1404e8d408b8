"""The routing benchmark's own arithmetic: rounds replayed, policies, groups, intervals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from engines import engine_of, request, run, served, tokens_of
from numpy.typing import NDArray
from online import routes
from online.rounds import Both, Tally, replayed, replayed_suffixes
from online.routes import Case
from prompts import Prompt
from tiny_models import tiny_llama
from training_records import training_record

from paceline.actors.replay.record import ReplayRecord

GOOD, BAD = Tally(4, 16, 12, 0.9), Tally(10, 40, 2, 0.1)


def case(key: str, topic: str, tallies: dict[str, Tally], sure: float = 0.9) -> Case:
    rest = (1.0 - sure) / 2
    thoughts = {"sql": rest, "math": rest, "general": rest} | {topic: sure}
    return Case(key, key, topic, thoughts, tallies)


def agreement(*rows: list[bool]) -> NDArray[np.bool_]:
    return np.array(rows, dtype=bool)


def test_rounds_are_replayed_from_agreement() -> None:
    yes, no = True, False
    assert replayed(agreement([]), 4, 9) == Tally(0, 0, 0, 0.0)
    assert replayed(agreement([yes]), 4, 9) == Tally(1, 4, 1, 1.0)
    # a round of 4 accepts 2 and corrects, one of 2 accepts both: a third would be the 7th token
    found = replayed(agreement([yes, yes, no, yes, yes, no]), 4, 6)
    assert found == Tally(rounds=2, drafted=4 + 2, accepted=4, gain=pytest.approx(4 / 6))
    # the last token that is allowed is not drafted for
    assert replayed(agreement([no, no]), 4, 2) == Tally(1, 1, 0, 0.0)
    # an answer that ended by itself: nothing is accepted beyond its end
    assert replayed(agreement([yes, yes]), 4, 90) == Tally(1, 4, 2, 1.0)


def test_a_later_token_of_a_round_is_that_of_a_later_step() -> None:
    first, second = [True] * 4, [True, False, True, True]
    # the second token of the first round is refused, all others of the second step are not
    assert replayed(agreement(first, second), 3, 9) == Tally(2, 6, 3, pytest.approx(7 / 8))


def record(prompt: list[int], output: list[int]) -> ReplayRecord:
    named = {"prompt_token_ids": prompt, "output_token_ids": output}
    arrays = {name: np.array(ids, dtype=np.int32) for name, ids in named.items()}
    return replace(training_record(0), **arrays)  # type: ignore[arg-type]


def test_suffixes_are_replayed_from_what_came_before() -> None:
    first = record([1, 2, 3], [10, 11, 12, 13, 14, 15, 16, 17])
    again, other = record([9, 2, 3], [10, 11, 12, 13, 99, 15]), record([7], [30, 31])
    found = replayed_suffixes([first, again, other], 3, 90)
    assert found[0] == Tally(8, 0, 0, 0.0)  # nothing is known
    # 10 11 12 and a bonus; 14 15 16 refused, 99 by the target; nothing follows 99
    assert found[1] == Tally(3, 6, 3, 3 / 6)
    assert found[2] == Tally(2, 0, 0, 0.0)
    known = replayed_suffixes([again], 3, 90, [first])
    assert known == found[1:2]
    # the request's own repetition; the last token that is allowed is not drafted for
    assert replayed_suffixes([record([5, 6, 1, 2, 3, 4, 5, 6, 1], [2, 3, 4])], 3, 3) == [
        Tally(1, 2, 2, 2 / 3)
    ]


def test_of_draft_and_suffix_the_more_promising_drafts() -> None:
    answer = list(range(40, 70))
    first, again = record([1, 2, 3], answer), record([9, 2, 3], answer)
    never, always = agreement([False] * 30), agreement([True] * 30)
    alone = replayed(never, 3, 90)
    both = Both(3, 90)
    unknown = both.replayed(first, never)  # nothing repeats: the draft alone
    assert (unknown.rounds, unknown.accepted) == (alone.rounds, 0)
    known = both.replayed(again, never)
    assert known.accepted > 20
    # a draft that is always right is not given up for suffixes
    both = Both(3, 90)
    for number in range(6):
        found = both.replayed(record([number, 2, 3], answer), always)
        assert found.accepted == replayed(always, 3, 90).accepted


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
        found = replayed(agreement(agrees[1:]), 3, 19)  # the first token comes with the prompt
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


def judged(tallies: dict[str, Tally], items: list[str]) -> dict[str, Any]:
    return {
        "keys": [f"key of {item}" for item in items],
        "items": items,
        "labels": ["sql"] * len(items),
        "probabilities": [{"sql": 0.9, "general": 0.1}] * len(items),
        "tallies": {
            name: [[t.rounds, t.drafted, t.accepted, t.gain]] * len(items)
            for name, t in tallies.items()
        },
    }


def arms_of(experts: dict[str, Tally], sampled: int) -> dict[str, Any]:
    single, items = {"general": BAD, "frozen": BAD}, [str(i) for i in range(5)]
    scored = judged(experts, [f"s{i}" for i in range(sampled)])
    return {
        "single": {"groups": {"topic sql": judged(single, items)}},
        "experts": {"groups": {"topic sql": judged(experts, items)}, "sampled": scored},
    }


def test_what_was_sampled_from_the_stream_is_not_sampled_again() -> None:
    tallies = {"general": GOOD, "math": BAD, "sql": BAD, "code": BAD, "shell": BAD}
    found = routes.chosen(arms_of(tallies, 40), 0.5, 0.0, 0)
    drafts = found.groupby("policy").draft.unique().apply(list)
    assert drafts["rule"] == ["sql"]
    assert drafts["measured"] == ["general"]


def test_translations_of_an_item_are_resampled_together() -> None:
    easy = [(4, 4 * (i % 2)) for i in range(6)]  # an item is alike in all languages
    rows = [
        ("single", f"lang {language}", f"tldr-common/{i}", "general", *easy[i])
        for language in ("de", "en", "fr")
        for i in range(6)
    ]
    columns = ["policy", "group", "item", "draft", "rounds", "accepted"]
    table = pd.DataFrame(rows, columns=columns).assign(seed=0)
    found = {row["group"]: row for row in routes.summary(table)}
    whole, german = found["languages"], found["lang de"]
    assert whole["items"] == german["items"] == 6  # English is apart
    # twice the same tells no more than once
    assert whole["mean_acceptance_length"] == german["mean_acceptance_length"]


def test_languages_are_asked_what_english_has_too() -> None:
    def prompts(language: str, *items: str) -> dict[str, Prompt]:
        return {item: Prompt(f"{language}/{item}", language, (1,)) for item in items}

    fitting = {
        "en": prompts("en", "a", "b", "c", "d"),
        "de": prompts("de", "x", "b", "a", "d"),
        "ru": prompts("ru", "c", "y"),
        "zh": prompts("zh", "z"),
    }
    found = {
        language: [prompt.key for prompt, _ in own]
        for language, own in routes.parallel(fitting, 2).items()
    }
    assert found == {"en": ["en/a", "en/b", "en/c"], "de": ["de/b", "de/a"], "ru": ["ru/c"]}


def test_the_report_sums_over_seeds_and_compares_with_the_single_draft() -> None:
    experts = {"general": BAD, "math": BAD, "code": BAD, "shell": BAD, "sql": GOOD}
    least = {"sql": 0.75, "math": 0.75}
    tables = [
        routes.chosen(arms_of(experts, 2), least, 1.0, seed).assign(seed=seed) for seed in (0, 1)
    ]
    found = {(row["group"], row["policy"]): row for row in routes.summary(pd.concat(tables))}
    assert {group for group, _ in found} == {"mixed", "topic sql"}
    rule = found["mixed", "rule"]
    assert rule["mean_acceptance_length"]["value"] == pytest.approx(4.0)
    assert rule["over_single"]["value"] == pytest.approx(4.0 - 1.2)
    assert rule["over_single"]["low"] == pytest.approx(4.0 - 1.2)  # all prompts alike
    assert len(rule["by_seed"]) == 2
    assert found["mixed", "general"]["mean_acceptance_length"]["value"] == pytest.approx(1.2)
