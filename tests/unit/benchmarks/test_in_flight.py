"""The benchmark of requests in flight: its blocks, its driver, what it makes of the times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from engines import TOKENIZER, make_engine
from online.in_flight import Driven, Plan, Wanted, blocks_of, drive, measure, section, teach
from online.rows import Question
from online.traces import Arrival
from online.traffic_plan import PLAIN
from tiny_models import tiny_llama

from paceline.actors.speculation.pending_updates import SwapWeights

WORDS = tuple(TOKENIZER.encode("SELECT name FROM people WHERE age > 30", add_special_tokens=False))


def pool(count: int) -> list[Question]:
    """Prompts of a and b in turn, each longer than the one before."""
    return [Question(str(i), "ab"[i % 2], WORDS[: 2 + i % 6] * (1 + i // 6)) for i in range(count)]


def test_blocks_share_no_prompt_and_the_longest_request_has_the_longest() -> None:
    arrivals = [Arrival(float(i), 10 * (i % 7 + 1), 1 + i % 5) for i in range(200)]
    blocks = blocks_of(pool(60), arrivals, Plan((1, 3), 2, 20, 0))
    assert {n: [len(block) for block in parts] for n, parts in blocks.items()} == {
        1: [20, 20],
        3: [30, 30],
    }
    for parts in blocks.values():
        keys = [one.question.key for block in parts for one in block]
        assert len(set(keys)) == len(keys)
    assert {one.max_tokens for one in blocks[1][0]} == {1, 2, 3, 4, 5}
    with pytest.raises(ValueError, match="2 blocks of 40 requests from 60"):
        blocks_of(pool(60), arrivals, Plan((4,), 2, 20, 0))


@pytest.mark.parametrize("plain", [True, False])
def test_so_many_are_in_flight_and_plain_ones_draft_nothing(
    plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_seqs=4, eos=-1)
    wanted = [Wanted(question, 3 + i) for i, question in enumerate(pool(7))]
    at_once = []
    step: Callable[[], object] = engine.step

    def watched() -> object:
        at_once.append(engine.num_running + engine.num_waiting)
        return step()

    monkeypatch.setattr(engine, "step", watched)
    done = drive(engine, wanted, 3, plain)
    assert max(at_once) == 3
    assert {key: len(answer) for key, answer in done.answers.items()} == {
        one.question.key: one.max_tokens for one in wanted
    }
    assert (done.rounds == 0) == plain
    assert done.seconds > 0


class Taking:
    """A learner that hands weights out with every record."""

    def __init__(self, _: object, topics: Sequence[str], __: object, put: Any) -> None:
        self._topics, self._put, self._taken = topics, put, 0

    def take(self, _: object) -> None:
        self._taken += 1
        for topic in self._topics:
            state = tiny_llama(9, layers=1, vocab=300).state_dict()
            self._put(SwapWeights(topic, self._taken, state))

    def facts(self) -> dict[str, Any]:
        return {"published": self._taken, "decisions": []}


def test_what_was_learnt_is_loaded_before_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("online.in_flight.Learner", Taking)
    monkeypatch.setattr("online.in_flight.TOPICS", ("a", "b"))
    engine = make_engine()
    lessons = SimpleNamespace(frozen=lambda _, count: [SimpleNamespace(record=None)] * count)
    assert teach(lessons, engine, 3) == {"published": 6}  # type: ignore[arg-type]
    assert not engine.has_work
    assert {name: engine.drafts()[name] for name in ("a", "b")} == {"a": 6, "b": 6}


def test_blocks_go_round_and_every_variant_answers_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, bool]] = []

    def told(engine: str, _block: object, _at_once: int, plain: bool) -> Driven:
        order.append((engine, plain))
        seconds = {"p": 0.4, "f": 0.5, "o": 0.2}[engine]
        return Driven(
            seconds, 0 if plain else 25, {"x": [1] * 99, "y": [3 if engine == "o" else 2]}
        )

    monkeypatch.setattr("online.in_flight.drive", told)
    engines = {PLAIN: "p", "frozen": "f", "online": "o"}
    rows = measure(engines, [[], [], []], 2)  # type: ignore[arg-type]
    assert "".join(engine for engine, _ in order) == "pfofopopf"
    assert all(plain == (engine == "p") for engine, plain in order)
    assert rows[PLAIN]["speed"]["value"] == 1.0
    assert rows["frozen"]["speed"]["value"] == pytest.approx(0.8)
    assert rows["online"]["speed"] == pytest.approx({"value": 2.0, "low": 2.0, "high": 2.0})
    assert rows["frozen"]["ms_per_token"] == pytest.approx(5.0)
    assert (rows["online"]["rounds_per_100_tokens"], rows["online"]["differ"]) == (25.0, 3)
    assert (rows["frozen"]["differ"], rows["frozen"]["compared"]) == (0, 6)
    figures = {"plan": {"blocks": 3, "least": 4, "lessons": 5}, "machine": {"cpu": "one"}}
    figures |= {"taught": {"seconds": 7.0, "published": 2}, "threads": 1, "trace": "a trace"}
    text = section(figures | {"in_flight": {"2": rows}}, "make it")
    assert "| 2 | online | 2.00 | 2.00 (2.00 to 2.00) | 25 | 3 of 6 |" in text
