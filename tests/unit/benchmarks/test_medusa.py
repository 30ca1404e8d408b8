"""Drafts against Medusa heads: counting by position and topic, through the real engine."""

from __future__ import annotations

import pytest
from decoding import Cell, Served, make_blocks
from engines import TOKENIZER
from online.medusa import PLAIN, draft_names, measure
from prompts import Prompt
from unit.benchmarks.test_medusa_heads import SIZES, K, medusa_engine, random_state

WORDS = TOKENIZER.encode("SELECT name, age FROM people WHERE age > 30", add_special_tokens=False)


@pytest.mark.full
def test_every_variant_answers_alike_and_is_told_apart_by_topic() -> None:
    engine = medusa_engine(random_state(SIZES, 3), k=K)
    variants = [
        Served(PLAIN, engine, 0),
        Served("heads, k=2", engine, 2, lambda _: "a"),
        Served("draft, k=3", engine, 3, lambda _: "b"),
    ]
    prompts = {
        topic: [Prompt(f"{10 * t + i}", topic, tuple(WORDS[i : i + 5 + t])) for i in range(4)]
        for t, topic in enumerate(("sql", "shell"))
    }
    figures = measure(Cell(1, 0.0), variants, make_blocks(prompts, 1, 2), 12)
    for name, facts in figures["variants"].items():
        assert facts["answers_that_differ"] == 0
        assert (facts["mean_acceptance_length"] is None) == (name == PLAIN)


def test_every_kind_has_a_draft_of_its_own_for_a_topic() -> None:
    kinds = ("general", "one draft", "draft per topic", "one set of heads", "heads per topic")
    names = {kind: draft_names(kind)(Prompt("", "sql", ())) for kind in kinds}
    assert len(set(names.values())) == len(kinds)
    assert names["draft per topic"] == "sql"
    assert draft_names("one set of heads")(Prompt("", "math", ())) == names["one set of heads"]
