"""The demo's prompts: many, distinct, the same everywhere, in disjoint parts."""

import ast
import re
from itertools import islice

import pytest

from paceline.deploy.demo.prompts import COMMAND_TASKS, DOMAINS, MAKERS, TOPICS, generate, split


@pytest.mark.parametrize("topic", TOPICS)
def test_thousands_of_distinct_prompts(topic: str) -> None:
    texts = generate(topic, 3_000, seed=0)
    assert len(texts) == len(set(texts)) == 3_000
    assert all(text.strip() == text and text.isprintable() for text in texts)


@pytest.mark.parametrize("topic", TOPICS)
def test_same_seed_same_prompts_and_longer_lists_extend_shorter_ones(topic: str) -> None:
    assert generate(topic, 200, seed=7) == generate(topic, 500, seed=7)[:200]
    assert generate(topic, 200, seed=7) != generate(topic, 200, seed=8)


EXPECTED_SQL = (
    "What are the clubs of chess players whose country is India and whose title is Master?"
)
EXPECTED_SHELL = (
    "How can I use the command `git commit` in a terminal to save my changes to index.html? "
    "Give one example with a short explanation."
)


def test_prompts_do_not_drift_between_releases() -> None:
    # figures of earlier runs can be compared only while a seed means the same prompts
    assert generate("sql", 1, seed=0)[0].endswith(EXPECTED_SQL)
    assert generate("shell", 1, seed=0)[0] == EXPECTED_SHELL


@pytest.mark.parametrize("topic", TOPICS)
def test_split_is_disjoint_and_stable(topic: str) -> None:
    one, other = split(topic, 0), split(topic, 0)
    stream = tuple(islice(one.stream, 700))
    assert stream == tuple(islice(other.stream, 700))
    assert one.last == other.last
    assert (len(one.last), len({*stream, *one.last})) == (40, 740)


def test_an_exhausted_generator_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAKERS, "math", lambda rng: rng.choice("ab"))
    with pytest.raises(ValueError, match="only 2 distinct prompts"):
        generate("math", 3, seed=0)


def test_sql_prompts_name_the_columns_that_they_ask_for() -> None:
    domains = {domain.many: domain for domain in DOMAINS}
    for text in generate("sql", 500, seed=1):
        table, columns = re.search(r"The table is (\w+)\((.*?)\)\. \S", text).groups()
        domain = domains[table.replace("_", " ")]
        assert columns.replace("_", " ").split(", ") == [
            *domain.texts, *domain.numbers, *(name for name, _ in domain.groups)
        ]  # fmt: skip
        assert domain.one in text or domain.many in text.split("). ")[1]


def test_shell_prompts_have_a_command_and_no_open_slot() -> None:
    commands = {command for command, _ in COMMAND_TASKS}
    texts = generate("shell", 2_000, seed=1)
    assert {text.split("`")[1] for text in texts} == commands
    assert not any("{" in text or "}" in text for text in texts)


def test_code_prompts_end_in_a_test_that_parses() -> None:
    for text in generate("code", 500, seed=1):
        tree = ast.parse(text[text.index("assert ") :])
        assert isinstance(tree.body[0], ast.Assert)
