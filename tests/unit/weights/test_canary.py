"""The canary's statistics and decisions, on requests drawn from known distributions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats as scipy_stats

from paceline.actors.weights.canary import (
    Canary,
    CanaryAction,
    CanaryMonitor,
    CanarySettings,
    PromotionWatch,
)
from paceline.actors.weights.draft_outcomes import (
    AcceptanceStats,
    DraftOutcome,
    VariancePrior,
    compare,
    compare_sequentially,
)
from paceline.actors.weights.slots import candidate_of, expert_of, in_canary, slot_for

STABLE, CANDIDATE, NEXT = 3, 4, 5
SETTINGS = CanarySettings()


def outcome(version: int, accepted: int, rounds: int = 20, expert: str = "sql") -> DraftOutcome:
    return DraftOutcome(expert, version, rounds, accepted)


def drawn(rng: np.random.Generator, version: int, rate: float) -> DraftOutcome:
    """A request whose own acceptance scatters about the rate, as answers do."""
    own = float(np.clip(rng.normal(rate, 0.15), 0.0, 1.0))
    rounds = int(rng.integers(5, 40))
    return outcome(version, int(rng.binomial(rounds, own)), rounds)


def trial(seed: int, gain: float, share: float = 0.5) -> CanaryAction | None:
    rng, canary = np.random.default_rng(seed), Canary(CANDIDATE, STABLE, SETTINGS)
    for _ in range(1_000):
        version, rate = (CANDIDATE, 0.5 + gain) if rng.random() < share else (STABLE, 0.5)
        decided = canary.observe(drawn(rng, version, rate))
        if decided is not None:
            return decided
    return None


def promoted_share(gain: float, trials: int = 60) -> float:
    decisions = [trial(seed, gain) for seed in range(trials)]
    assert None not in decisions  # a thousand requests decide every trial
    return decisions.count(CanaryAction.PROMOTE) / trials


def test_better_candidates_pass_and_worse_ones_do_not() -> None:
    assert promoted_share(+0.15) >= 0.95
    assert promoted_share(-0.15) == 0.0
    assert promoted_share(-0.06) <= 0.2


@dataclass(frozen=True)
class Traffic:
    """Requests of one draft: mean and spread of their acceptance, and their mean rounds."""

    mean: float
    spread: float
    rounds: int

    def drawn(self, rng: np.random.Generator, version: int, gain: float = 0.0) -> DraftOutcome:
        mean = self.mean + gain
        certainty = mean * (1.0 - mean) / self.spread**2 - 1.0
        own = rng.beta(mean * certainty, (1.0 - mean) * certainty)
        rounds = max(1, int(rng.poisson(self.rounds)))
        return outcome(version, int(rng.binomial(rounds, own)), rounds)


TRIALS = 400
ALLOWED = 0.075  # a test of a rate of 5 % in so many trials, at 1 %
TRAFFIC = [
    Traffic(0.5, 0.15, 20),
    Traffic(0.5, 0.25, 60),
    Traffic(0.2, 0.25, 3),
    Traffic(0.8, 0.25, 20),
    Traffic(0.3, 0.05, 60),
]


def early_decisions(traffic: Traffic, gain: float, share: float) -> Counter[CanaryAction | None]:
    """What trials are decided by before their last look; None are those that reach it."""
    rng, found = np.random.default_rng(11), Counter[CanaryAction | None]()
    for _ in range(TRIALS):
        canary, action = Canary(CANDIDATE, STABLE, SETTINGS), None
        while action is None:
            on_trial = rng.random() < share
            version = CANDIDATE if on_trial else STABLE
            action = canary.observe(traffic.drawn(rng, version, gain * on_trial))
        requests = min(canary.candidate_stats.requests, canary.stable_stats.requests)
        found[action if requests < SETTINGS.most else None] += 1
    return found


@pytest.mark.parametrize("share", [pytest.param(0.1, marks=pytest.mark.full), 0.5])
@pytest.mark.parametrize("traffic", TRAFFIC, ids=str)
def test_looks_at_every_request_err_no_more_often_than_they_may(
    traffic: Traffic, share: float
) -> None:
    """The margin is what a promoted candidate may be worse by."""
    equal = early_decisions(traffic, 0.0, share)
    assert equal[CanaryAction.ROLL_BACK] <= ALLOWED * TRIALS
    worse = early_decisions(traffic, -SETTINGS.margin, share)
    assert worse[CanaryAction.PROMOTE] <= ALLOWED * TRIALS


def test_what_is_far_better_or_worse_is_decided_by_two_or_three_of_its_requests() -> None:
    rng, traffic = np.random.default_rng(5), Traffic(0.2, 0.15, 20)
    for mine, other, expected in (
        (0.6, 0.0, CanaryAction.PROMOTE),
        (0.0, 0.6, CanaryAction.ROLL_BACK),
    ):
        taken = []
        for _ in range(100):
            canary, action = Canary(CANDIDATE, STABLE, SETTINGS), None
            while action is None:
                gain, version = ((mine, CANDIDATE), (other, STABLE))[int(rng.random() > 0.1)]
                action = canary.observe(traffic.drawn(rng, version, gain))
            assert action is expected
            taken.append(canary.candidate_stats.requests)
        assert np.median(taken) <= 3


def test_a_sequential_bound_is_robbins_normal_mixture() -> None:
    """Of many requests the prior counts for nothing, and the bound is the published one."""
    rng, both = np.random.default_rng(2), [AcceptanceStats(), AcceptanceStats()]
    for _ in range(20_000):
        for stats, rate in zip(both, (0.4, 0.5), strict=True):
            stats.add(Traffic(rate, 0.15, 20).drawn(rng, 1))
    found = compare_sequentially(*both, error=0.05, scale=0.12)
    variance = sum(stats.variance() / stats.requests for stats in both)
    # Howard et al., two-sided at 0.1: of a sum with the intrinsic time v, over v.
    v, rho = 1.0 / variance, 1.0 / 0.12**2
    reach = np.sqrt((v + rho) * np.log((v + rho) / (rho * 0.1**2))) / v
    assert found.difference == pytest.approx(-0.1, abs=0.01)
    assert found.upper - found.difference == pytest.approx(reach, rel=0.01)
    assert found.difference - found.lower == pytest.approx(reach, rel=0.01)


def test_acceptance_stats_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    rounds = rng.integers(1, 30, 50)
    accepted = rng.binomial(rounds, 0.4)
    stats = AcceptanceStats()
    for n, a in zip(rounds, accepted, strict=True):
        stats.add(outcome(1, int(a), int(n)))
    rate = accepted.sum() / rounds.sum()
    assert stats.rate == pytest.approx(rate)
    residuals = (accepted - rate * rounds) / rounds.mean()
    assert stats.variance() == pytest.approx((residuals**2).sum() / 49)


def test_a_comparison_without_assumptions_is_welchs() -> None:
    rng = np.random.default_rng(1)
    samples = [rng.integers(0, 21, 40), rng.integers(3, 21, 30)]
    both = []
    for values in samples:
        both.append(AcceptanceStats())
        for value in values:
            both[-1].add(outcome(1, int(value), 20))
    found = compare(*both, error=0.05, prior=VariancePrior(weight=0.0))
    expected = scipy_stats.ttest_ind(samples[0] / 20, samples[1] / 20, equal_var=False)
    interval = expected.confidence_interval(0.9)
    assert found.lower == pytest.approx(interval.low, abs=2e-3)  # degrees of freedom are whole
    assert found.upper == pytest.approx(interval.high, abs=2e-3)


def test_nothing_is_promoted_without_evidence_of_both() -> None:
    alone = Canary(CANDIDATE, STABLE, SETTINGS)
    assert {alone.observe(outcome(CANDIDATE, 20)) for _ in range(200)} == {None}
    without = Canary(CANDIDATE, STABLE, SETTINGS)
    assert {without.observe(outcome(STABLE, 20)) for _ in range(200)} == {None}


def test_requests_of_other_versions_say_nothing() -> None:
    canary = Canary(CANDIDATE, STABLE, SETTINGS)
    for _ in range(100):
        canary.observe(outcome(STABLE, 10))
        assert canary.observe(outcome(2, 20)) is None
    assert canary.stats()["canary_requests"] == 0


def test_a_clear_case_is_decided_at_the_first_look_and_an_equal_one_by_its_mean() -> None:
    for accepted, decided in ((18, CanaryAction.PROMOTE), (2, CanaryAction.ROLL_BACK)):
        canary = Canary(CANDIDATE, STABLE, SETTINGS)
        for _ in range(SETTINGS.least - 1):
            canary.observe(outcome(STABLE, 20 - accepted))
            assert canary.observe(outcome(CANDIDATE, accepted)) is None
        canary.observe(outcome(STABLE, 20 - accepted))
        assert canary.observe(outcome(CANDIDATE, accepted)) is decided
        assert canary.stats()["looks"] == 1
    for odd, decided in ((0, CanaryAction.PROMOTE), (1, CanaryAction.ROLL_BACK)):
        settings = CanarySettings(margin=0.0)
        canary, taken = Canary(CANDIDATE, STABLE, settings), []
        for number in range(settings.most):
            canary.observe(outcome(STABLE, 0 if number % 2 else 20))
            accepted = 20 if number % 2 else 0
            accepted -= number == odd == 1  # one position of one request
            taken.append(canary.observe(outcome(CANDIDATE, accepted)))
        assert set(taken[:-1]) == {None}
        assert taken[-1] is decided


def test_a_candidate_with_failing_drafts_is_rolled_back_at_once() -> None:
    canary = Canary(CANDIDATE, STABLE, SETTINGS)
    assert canary.observe(DraftOutcome("sql", 2, 0, 0, failed=True)) is None
    assert canary.observe(DraftOutcome("sql", 4, 0, 0, failed=True)) is CanaryAction.ROLL_BACK
    assert canary.stats()["reason"] == "its drafts failed"


SILENT, HALF = 0, 10  # rounds of a request without a draft; accepted of 20


def decided(
    first: DraftOutcome, second: DraftOutcome, at_most: int = 400
) -> tuple[CanaryAction | None, int]:
    """The decision on two slots whose requests end by turns, and how many of each it took."""
    canary = Canary(CANDIDATE, STABLE, SETTINGS)
    for number in range(1, at_most + 1):
        for one in (first, second):
            decided = canary.observe(one)
            if decided is not None:
                assert len(canary.stats()["reason"]) > 0
                return decided, number
    return None, at_most


def test_a_trial_in_which_one_slot_never_drafts_is_decided_for_the_other() -> None:
    last = SETTINGS.most
    candidate, stable = outcome(CANDIDATE, HALF), outcome(STABLE, HALF)
    none = {version: outcome(version, 0, SILENT) for version in (CANDIDATE, STABLE)}
    assert decided(candidate, none[STABLE]) == (CanaryAction.PROMOTE, last)
    assert decided(none[CANDIDATE], stable) == (CanaryAction.ROLL_BACK, last)
    assert decided(none[CANDIDATE], none[STABLE])[0] is None
    failing = DraftOutcome("sql", STABLE, 0, 0, failed=True)
    assert decided(candidate, failing)[0] is None  # a failure is not silence


@pytest.mark.parametrize("period", [3, 10])
@pytest.mark.parametrize("active", [CANDIDATE, STABLE])
def test_a_slot_that_never_drafts_loses_against_one_that_drafts_rarely(
    active: int, period: int
) -> None:
    canary, taken = Canary(CANDIDATE, STABLE, SETTINGS), []
    for number in range(40 * period):
        for version in (*[STABLE] * 3, CANDIDATE):
            drafts = number % period == 0 and version == active
            taken.append(canary.observe(outcome(version, HALF if drafts else 0, 20 * drafts)))
    action = CanaryAction.PROMOTE if active == CANDIDATE else CanaryAction.ROLL_BACK
    assert next(filter(None, taken)) is action


@pytest.mark.parametrize("canary_share", [0.1, 0.5])
@pytest.mark.parametrize("drafted", [0.05, 0.4])
def test_equal_slots_that_draft_rarely_are_seldom_decided_by_that(
    drafted: float, canary_share: float
) -> None:
    rng, decided, trials = np.random.default_rng(6), 0, 100
    for _ in range(trials):
        canary = Canary(CANDIDATE, STABLE, SETTINGS)
        for _ in range(1_500):
            version = CANDIDATE if rng.random() < canary_share else STABLE
            rounds = 20 * (rng.random() < drafted)
            if canary.observe(outcome(version, int(rng.binomial(rounds, 0.6)), rounds)):
                break
        decided += "reason" in canary.stats()
    assert decided <= 0.02 * trials


def test_slots_that_both_draft_rarely_are_compared_by_what_they_draft() -> None:
    """A controller that hardly drafts for a topic probes now and then, with either slot."""
    canary = Canary(CANDIDATE, STABLE, SETTINGS)
    for number in range(400):  # the stable draft has nine times the requests
        for version in (*[STABLE] * 9, CANDIDATE):
            drafts = number % 10 == 0 and (version == STABLE or number < 30)
            assert canary.observe(outcome(version, HALF if drafts else 0, 20 * drafts)) is (None)


def test_silence_moves_no_mean_and_no_count_of_drafted_requests() -> None:
    with_silence, without = AcceptanceStats(), AcceptanceStats()
    monitor = CanaryMonitor(("sql",), SETTINGS)
    monitor.begin_trial("sql", CANDIDATE, STABLE)
    for accepted in (3, 18, 7):
        for version in (STABLE, CANDIDATE):
            monitor.observe(outcome(version, accepted))
            monitor.observe(outcome(version, 0, SILENT))
        with_silence.add(outcome(STABLE, accepted))
        without.add(outcome(STABLE, accepted))
        with_silence.add(outcome(STABLE, 0, SILENT))
    assert (with_silence.rate, with_silence.variance()) == (without.rate, without.variance())
    assert with_silence.requests == 3
    assert monitor.counts("sql") == {
        "requests": 6, "rounds": 120, "accepted": 56, "canary_requests": 3,
    }  # fmt: skip
    figures = monitor.stats("sql")
    assert (figures["canary_silent"], figures["stable_silent"]) == (3, 3)


@pytest.mark.parametrize("spoken", [0, 1, 7])
def test_what_took_a_silent_drafts_place_is_watched_where_there_is_a_past(spoken: int) -> None:
    monitor = CanaryMonitor(("sql",), SETTINGS)
    monitor.begin_trial("sql", CANDIDATE, STABLE)
    steps = [monitor.observe(outcome(STABLE, 20)) for _ in range(spoken)]
    steps += [monitor.observe(outcome(STABLE, 0, SILENT)) for _ in range(40)]
    if spoken < SETTINGS.least:
        steps += [monitor.observe(outcome(CANDIDATE, HALF)) for _ in range(SETTINGS.most)]
        assert steps[-1] is not None
        assert steps[-1].action is CanaryAction.PROMOTE
    monitor.promote("sql")
    later = [monitor.observe(outcome(CANDIDATE, 1)) for _ in range(SETTINGS.watch[0])]
    assert [s.action for s in later if s] == ([CanaryAction.TRY_PREVIOUS] if spoken == 7 else [])


def test_requests_beside_the_next_trial_count_for_the_version_that_is_watched() -> None:
    monitor = CanaryMonitor(("sql",), SETTINGS)
    monitor.begin_trial("sql", CANDIDATE, STABLE)
    for _ in range(SETTINGS.least):
        monitor.observe(outcome(STABLE, 20))
    monitor.promote("sql")
    monitor.begin_trial("sql", NEXT, CANDIDATE)
    for _ in range(SETTINGS.watch[0]):
        monitor.observe(outcome(CANDIDATE, 1))
    monitor.end_trial("sql")
    step = monitor.observe(outcome(CANDIDATE, 1))
    assert step is not None
    assert (step.action, step.version) == (CanaryAction.TRY_PREVIOUS, CANDIDATE)


def test_a_promoted_version_that_falls_behind_its_predecessor_is_suspected() -> None:
    before = AcceptanceStats()
    for _ in range(20):
        before.add(outcome(STABLE, 12))
    falling, steady = (PromotionWatch(CANDIDATE, before, SETTINGS) for _ in range(2))
    assert any(falling.observe(outcome(CANDIDATE, 5)) for _ in range(16))
    assert not any(steady.observe(outcome(CANDIDATE, 12)) for _ in range(300))
    assert steady.ended
    assert falling.stats()["acceptance_before"] == 0.6


def test_trials_of_experts_are_their_own() -> None:
    monitor = CanaryMonitor(("sql", "math"), SETTINGS)
    monitor.begin_trial("sql", CANDIDATE, STABLE)
    steps = []
    for _ in range(SETTINGS.least):
        for version, accepted in ((STABLE, 4), (CANDIDATE, 16)):
            steps += [
                monitor.observe(outcome(version, accepted, expert=e)) for e in ("sql", "math")
            ]
    found = [step for step in steps if step is not None]
    assert [(step.action, step.expert, step.version) for step in found] == [
        (CanaryAction.PROMOTE, "sql", CANDIDATE)
    ]
    assert found[0].stats["canary_acceptance"] == 0.8
    assert monitor.counts("math") == {
        "requests": 4, "rounds": 80, "accepted": 40, "canary_requests": 0,
    }  # fmt: skip
    assert monitor.observe(outcome(1, 4, expert="poems")) is None


@pytest.mark.parametrize("counts", [(5, 6), (-1, 0), (3, -1), (-2, -3)])
def test_counts_that_cannot_be_are_left_out(counts: tuple[int, int]) -> None:
    monitor = CanaryMonitor(("sql",), SETTINGS)
    monitor.observe(DraftOutcome("sql", STABLE, *counts))
    assert monitor.counts("sql")["requests"] == 0


def test_requests_are_split_by_id_and_differently_for_each_expert() -> None:
    ids = [f"request-{number}" for number in range(4_000)]
    chosen = {name for name in ids if in_canary("sql", name, 0.1)}
    assert 320 < len(chosen) < 480
    assert chosen <= {name for name in ids if in_canary("sql", name, 0.3)}
    assert not any(in_canary("sql", name, 0.0) for name in ids)
    both = chosen & {name for name in ids if in_canary("general", name, 0.3)}
    assert len(both) / len(chosen) == pytest.approx(0.3, abs=0.08)
    inside, outside = next(iter(chosen)), next(name for name in ids if name not in chosen)
    held = {"sql", candidate_of("sql"), "math", "sql@0"}
    assert slot_for("sql", inside, 0.1, held) == "sql@candidate"
    assert slot_for("sql", outside, 0.1, held) == "sql"
    for draft in ("math", "sql@0", "off"):
        assert slot_for(draft, inside, 0.1, held) == draft
    assert {expert_of(d) for d in ("sql", "sql@0", "sql@candidate")} == {"sql"}
