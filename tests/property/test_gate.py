"""The gate with held-out records and earlier tests: what evidence must and must not do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.actors.training.gate import GateDecision, GateSettings, decide

SETTINGS = GateSettings()
ERROR = 1.0 - SETTINGS.confidence
SCORES = st.floats(0.0, 1.0)


def gains(low: float, high: float, least: int = 0) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(low, high), min_size=least, max_size=40)


def judged(held_out: list[float], earlier: list[float], looks: int = 1) -> GateDecision:
    """The decision about a candidate that gained so much on each record."""
    served = np.full(len(held_out), 0.5)
    return decide(served + np.array(held_out), served, SETTINGS, earlier=earlier, looks=looks)


@given(gains(-0.5, SETTINGS.min_gain, 4), gains(-1.0, SETTINGS.min_gain))
def test_what_gains_nowhere_is_never_published(held_out: list[float], earlier: list[float]) -> None:
    assert not judged(held_out, earlier).publish


@given(gains(-0.5, 0.5, 4), gains(0.0, 1.0))
def test_no_earlier_gain_publishes_weights_without_one(
    held_out: list[float], earlier: list[float]
) -> None:
    """However well the earlier weights did."""
    lost = [gain - max(0.0, float(np.mean(held_out))) for gain in held_out]
    assert not judged(lost, earlier).publish


@given(gains(-0.5, 0.5, 4), gains(-1.0, 1.0), st.floats(0.0, 0.5), st.integers(1, 50))
def test_a_larger_gain_everywhere_is_more_evidence(
    held_out: list[float], earlier: list[float], more: float, looks: int
) -> None:
    less = judged(held_out, earlier, looks)
    larger = judged([g + more for g in held_out], [g + more for g in earlier], looks)
    assert larger.gain_lower_bound == pytest.approx(less.gain_lower_bound + more, abs=1e-9)
    assert larger.publish >= less.publish


@given(gains(-0.5, 0.5, 4), gains(-1.0, 1.0), st.integers(2, 4))
def test_the_same_gains_on_more_records_are_more_evidence(
    held_out: list[float], earlier: list[float], times: int
) -> None:
    once, often = judged(held_out, earlier), judged(held_out * times, earlier * times)
    assert often.gain_lower_bound >= once.gain_lower_bound - 1e-9
    assert often.publish >= once.publish


@given(gains(-0.5, 0.5, 4), gains(-1.0, 1.0), st.integers(1, 50), st.integers(1, 50))
def test_every_further_look_asks_for_more(
    held_out: list[float], earlier: list[float], looks: int, further: int
) -> None:
    before, after = judged(held_out, earlier, looks), judged(held_out, earlier, looks + further)
    assert after.gain_lower_bound < before.gain_lower_bound
    assert after.publish <= before.publish


@given(st.lists(st.tuples(SCORES, SCORES), min_size=4, max_size=40), gains(-1.0, 1.0))
def test_the_order_of_records_does_not_matter(
    pairs: list[tuple[float, float]], earlier: list[float]
) -> None:
    candidate, served = np.array(pairs).T
    one = decide(candidate, served, earlier=earlier)
    other = decide(candidate[::-1], served[::-1], earlier=earlier[::-1])
    assert other.gain_lower_bound == pytest.approx(one.gain_lower_bound, abs=1e-9)


def published(
    gain: float, spread: float, similar: float, rounds: int, trials: int
) -> NDArray[np.int64]:
    """Drawn streams of 16 requests a round: the look that published, 0 for none.

    Of two kinds of weights, whose gains go together, the better one is judged, as
    ``Candidate.compare`` does.

    Args:
        gain: of both, from the first round on.
        spread: standard deviation of a record's gain.
        similar: correlation of a held-out record's gain from look to look.
        rounds: looks.
        trials: streams.
    """
    rng, found = np.random.default_rng(7), np.zeros(trials, dtype=np.int64)

    def pairs(count: int) -> NDArray[np.float64]:
        own = rng.normal(0.0, spread, (2, count))
        return np.stack([own[0], 0.6 * (0.8 * own[0] + 0.6 * own[1])])

    for trial in range(trials):
        own, tests = pairs(3 * rounds + 1), pairs(13 * rounds) + gain
        for look in range(1, rounds + 1):
            count = 3 * look + 1
            noise = (1.0 - similar**2) ** 0.5 * pairs(count)
            held_out, earlier = gain + similar * own[:, :count] + noise, tests[:, 13 : 13 * look]
            earlier = earlier[:, -64:]
            better = int(np.argmax((earlier if earlier.size else held_out).sum(axis=1)))
            if judged(held_out[better].tolist(), earlier[better].tolist(), look).publish:
                found[trial] = look
                break
    return found


@pytest.mark.parametrize("similar", [pytest.param(1.0, marks=pytest.mark.full), 0.7])
@pytest.mark.parametrize("spread", [0.05, 0.1, 0.2])
def test_all_looks_together_hardly_ever_publish_without_a_gain(
    spread: float, similar: float
) -> None:
    trials = 400
    passed = int((published(0.0, spread, similar, rounds=20, trials=trials) > 0).sum())
    assert passed <= trials * ERROR + 3 * (trials * ERROR * (1.0 - ERROR)) ** 0.5


def test_a_gain_of_five_hundredths_is_published_within_six_rounds() -> None:
    found = published(0.05, 0.1, 0.7, rounds=6, trials=200)
    assert (found > 0).mean() > 0.8
