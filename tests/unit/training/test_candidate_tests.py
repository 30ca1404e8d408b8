"""Test, then train: on what records a candidate is tested before it trains on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from local_client import filled, make_loop, trainer_settings
from numpy.typing import NDArray
from training_records import learn, training_record

from paceline.actors.replay.record import ReplayRecord, encode, synthetic_id
from paceline.actors.training.candidate import Candidate, one_per_conversation
from paceline.actors.training.progress import LeaseRevoked
from paceline.actors.weights.flat_weights import flatten

pytestmark = pytest.mark.usefixtures("deepspeed")


def records(start: int, stop: int) -> list[ReplayRecord]:
    return [training_record(n, created=float(n)) for n in range(start, stop)]


def trained(draft: Path) -> Candidate:
    """A candidate that was given records 0 to 7 and trained on them."""
    candidate = Candidate("sql", trainer_settings(draft))
    candidate.test(records(0, 8), lambda: None)
    assert not candidate.tests
    for _ in range(12):
        learn(candidate, records(0, 8))
    return candidate


def test_a_new_record_is_a_test_once(draft: Path) -> None:
    candidate = trained(draft)
    candidate.test(records(0, 12), lambda: None)
    assert len(candidate.tests) == 4
    found = candidate.compare(records(8, 12), lambda: None)
    assert found.tests == pytest.approx(list(found.scores - found.served))
    candidate.test(records(0, 12), lambda: None)
    assert len(candidate.tests) == 4
    candidate.test(records(2, 13), lambda: None)
    assert len(candidate.tests) == 5


def test_one_that_comes_late_or_repeats_a_prompt_or_is_made_up_is_no_test(draft: Path) -> None:
    candidate = trained(draft)
    late = training_record(20, created=3.5)
    again = replace(training_record(5, created=30.0), request_id="again")
    made = replace(training_record(21, created=30.0), request_id=synthetic_id("r3", 0))
    twins = [replace(training_record(22, created=30.0 + n), request_id=f"t{n}") for n in range(3)]
    candidate.test([late, again, made, *twins], lambda: None)
    assert len(candidate.tests) == 1


def test_several_answers_to_a_prompt_are_one_observation() -> None:
    twins = [replace(training_record(22), request_id=f"t{n}") for n in range(3)]
    assert [r.request_id for r in one_per_conversation([*twins, training_record(23)])] == [
        "t2",
        "r23",
    ]


def test_weights_that_do_not_differ_from_the_served_ones_are_not_tested(draft: Path) -> None:
    candidate = trained(draft)
    candidate.test(records(8, 12), lambda: None)
    scores, _, state, *_ = candidate.compare(records(0, 4), lambda: None)
    candidate.mark_published(1, state, records(0, 4), scores)
    assert not candidate.tests
    candidate.test(records(12, 16), lambda: None)
    assert not candidate.tests
    learn(candidate, records(12, 16))
    candidate.test(records(16, 18), lambda: None)
    assert len(candidate.tests) == 2


def test_what_starts_over_forgets_its_tests(draft: Path) -> None:
    candidate = trained(draft)
    candidate.test(records(8, 12), lambda: None)
    candidate.reset()
    assert not candidate.tests
    candidate.test(records(12, 16), lambda: None)
    assert not candidate.tests
    learn(candidate, records(0, 8))
    candidate.test(records(12, 17), lambda: None)
    assert len(candidate.tests) == 1
    # published weights may have been trained on whatever was there
    candidate.load(1, flatten(candidate.compare(records(0, 4), lambda: None).state))
    learn(candidate, records(0, 8))
    candidate.test(records(17, 20), lambda: None)
    assert not candidate.tests
    candidate.test(records(20, 23), lambda: None)
    assert len(candidate.tests) == 3


def test_a_test_that_is_interrupted_is_made_the_next_time(draft: Path) -> None:
    candidate = trained(draft)

    def revoked() -> None:
        raise LeaseRevoked

    with pytest.raises(LeaseRevoked):
        candidate.test(records(8, 12), revoked)
    assert not candidate.tests
    candidate.test(records(8, 12), lambda: None)
    assert len(candidate.tests) == 4


@pytest.mark.parametrize("tests", [[], [(0.1, 0.2)], [(0.2, 0.1)]])
def test_the_better_of_trained_and_halfway_weights_is_compared(
    draft: Path, tests: list[tuple[float, float]]
) -> None:
    """Tests tell which is better; the first comparison after a publication has none."""
    candidate = trained(draft)
    candidate.tests.extend(tests)
    first = records(12, 20)

    def scores(state: dict[str, torch.Tensor]) -> list[float]:
        return list(candidate._score(state, first, lambda: None))

    states = candidate._states()
    initial = candidate._distiller._initial
    for name, weight in states[1].items():
        mean = (states[0][name].float() + initial[name].float()) / 2
        assert torch.allclose(weight.float(), mean, rtol=0.01, atol=1e-6)
    gains = tests[0] if tests else [sum(scores(state)) for state in states]
    found = candidate.compare(first, lambda: None)
    assert found.halfway == (gains[1] > gains[0])
    assert found.tests == [pair[found.halfway] for pair in tests]
    assert list(found.scores) == scores(states[found.halfway])
    for name, weight in states[found.halfway].items():
        assert torch.equal(found.state[name], weight)


def test_a_record_that_the_served_draft_has_no_score_on_decides_nothing(
    draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = trained(draft)
    states = candidate._states()
    monkeypatch.setattr(candidate, "_states", lambda: states)

    def score(state: object, *_: object) -> NDArray[np.float64]:
        if state is candidate._served:
            return np.array([0.1, np.nan, 0.1])
        return np.array([0.2, 0.9, 0.2] if state is states[0] else [0.3, 0.2, 0.3])

    monkeypatch.setattr(candidate, "_score", score)
    assert candidate.compare(records(8, 11), lambda: None).halfway
    assert candidate._ahead


def test_the_candidate_trains_on_from_its_own_weights_whichever_are_published(draft: Path) -> None:
    candidate = trained(draft)
    before, halfway = candidate._states()
    candidate.mark_published(1, halfway, records(0, 4), np.zeros(4))
    after, _ = candidate._states()
    assert all(torch.equal(before[name], after[name]) for name in before)
    candidate.test(records(8, 12), lambda: None)
    assert not candidate.tests  # what follows is another publication's


def test_the_gate_decides_on_tests_too(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    settings = trainer_settings(draft, ("sql",), round_seconds=0.05)
    loop = make_loop(settings, client)
    for start in range(1_000, 1_040, 10):
        loop.run_round()
        for record in records(start, start + 10):
            client.shards["sql"].insert(encode(record))
    assert client.registry is not None
    history = client.registry.history("sql")
    assert history[0]["tests"] == 0
    assert any(decision["tests"] > 0 for decision in history)
