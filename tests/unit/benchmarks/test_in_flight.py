"""The benchmark of requests in flight: its blocks, its driver, what it makes of the times."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from decoding import Block
from engines import TOKENIZER, make_engine
from online.in_flight import Plan, blocks_of, measure, train
from online.rows import Question
from online.traces import Arrival
from online.traffic import ONLINE, PLAIN, VARIANTS
from prompts import Prompt
from tiny_models import tiny_llama

from paceline.actors.speculation.pending_updates import SwapWeights

WORDS = tuple(TOKENIZER.encode("SELECT name FROM people WHERE age > 30", add_special_tokens=False))


def pool(count: int) -> list[Question]:
    """Prompts of a and b in turn, each longer than the one before."""
    return [Question(str(i), "ab"[i % 2], WORDS[: 2 + i % 6] * (1 + i // 6)) for i in range(count)]


def test_blocks_share_no_prompt_and_the_longest_request_has_the_longest() -> None:
    arrivals = [Arrival(float(i), 10 * (i % 7 + 1), 1 + i % 5) for i in range(200)]
    blocks = blocks_of(pool(60), arrivals, Plan((1, 3), 2, 20, 0))
    assert {n: [len(block.prompts) for block in parts] for n, parts in blocks.items()} == {
        1: [20, 20],
        3: [30, 30],
    }
    for parts in blocks.values():
        keys = [one.number for block in parts for one in block.prompts]
        assert len(set(keys)) == len(keys)
    assert {one.max_tokens for one in blocks[1][0].prompts} == {1, 2, 3, 4, 5}
    with pytest.raises(ValueError, match="2 blocks of 40 requests from 60"):
        blocks_of(pool(60), arrivals, Plan((4,), 2, 20, 0))


class Taking:
    """A learner that puts weights with every record."""

    def __init__(self, _: object, topics: Sequence[str], __: object, put: Any) -> None:
        self._topics, self._put, self._records = topics, put, 0

    def add(self, _: object) -> None:
        self._records += 1
        for topic in self._topics:
            state = tiny_llama(9, layers=1, vocab=300).state_dict()
            self._put(SwapWeights(topic, self._records, state))

    def facts(self) -> dict[str, Any]:
        return {"published": self._records, "decisions": []}


def test_what_was_learnt_is_loaded_before_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("online.in_flight.Learner", Taking)
    monkeypatch.setattr("online.in_flight.TOPICS", ("a", "b"))
    engine = make_engine()
    lessons = SimpleNamespace(frozen=lambda _, count: [SimpleNamespace(record=None)] * count)
    assert train(lessons, engine, 3) == {"published": 6}  # type: ignore[arg-type]
    assert not engine.has_work
    assert {name: engine.drafts()[name] for name in ("a", "b")} == {"a": 6, "b": 6}


def test_every_variant_answers_every_block_alike_and_plain_ones_draft_nothing() -> None:
    engines = {name: make_engine(max_num_seqs=4, eos=-1) for name in VARIANTS}
    blocks = [
        Block(
            n + 1,
            "mixed",
            tuple(Prompt(3 * n + i, "ab"[i % 2], WORDS[: 3 + i], 3 + i) for i in range(3)),
        )
        for n in range(3)
    ]
    figures = measure(engines, blocks, 3)
    assert {facts["answers"] for facts in figures["variants"].values()} == {9}
    assert {facts["answers_that_differ"] for facts in figures["variants"].values()} == {0}
    assert figures["variants"][PLAIN]["mean_acceptance_length"] is None
    assert figures["variants"][ONLINE]["mean_acceptance_length"] >= 1.0
    assert figures["ratios"]["online / plain"]["blocks"] == 3
