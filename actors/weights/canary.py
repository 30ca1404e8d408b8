"""The canary: compare each candidate on live requests and decide about it. Pure.

This is the registry's decision on served requests; the trainer's, on held-out records, is
``actors/training/gate.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from paceline.actors.weights.draft_outcomes import (
    AcceptanceStats,
    Comparison,
    DraftOutcome,
    VariancePrior,
    compare,
    compare_sequentially,
)
from paceline.actors.weights.history import Decision

# A slot is idle below the first share of drafted requests, active from the second one on. Far
# apart: chance must not decide a topic for which both slots draft rarely.
_IDLE_BELOW = 0.25
_ACTIVE_FROM = 0.5
# An active slot may draft more rarely, if the other one drafts so many times more rarely still.
_TIMES_RARER = 16


class CanaryAction(StrEnum):
    """What the registry is to do about a topic."""

    PROMOTE = "promote"
    ROLL_BACK = "roll back"
    TRY_PREVIOUS = "try previous"


@dataclass(frozen=True, slots=True)
class CanarySettings:
    """Sequential test of candidates, and pauses between them.

    Attributes:
        least: requests that each slot needs for the first look; from then on every further
            request of the slot with fewer is one.
        most: of the last look, at which the mean decides.
        error: probability of a wrong decision to either side, over all looks except the last
            one's mean.
        scale: difference of acceptance that is found soonest, see compare_sequentially.
        margin: acceptance by which a candidate may be worse and still be promoted; the gate has
            shown that it is better on held-out records.
        bar: roll back a candidate shown not to be better by so much, unless it is shown to be
            better at all.
        watch: looks, in requests, at a promoted version against its predecessor's canary stats.
        audit_after: promotions without proof of being better, whatever came between them, after
            which the last known good version is tried against the stable one: each may have been
            worse by less than a trial shows, and the losses would add up.
        audit_most: of such a trial, which has no margin: the better version becomes stable.
        audit_bar: the bar of such a trial.
        min_trial_s: a candidate without outcomes is not replaced for so long, seconds.
        cooldown_s: pause after a topic's second rollback in a row, seconds; doubled by each
            further one.
        max_cooldown_s: longest pause, seconds.
        prior: see VariancePrior.
    """

    least: int = 2
    most: int = 32
    error: float = 0.05
    scale: float = 0.12
    margin: float = 0.03
    bar: float = 0.0
    watch: tuple[int, ...] = (16, 64, 256)
    audit_after: int = 3
    audit_most: int = 64
    audit_bar: float = 0.05
    min_trial_s: float = 60.0
    cooldown_s: float = 30.0
    max_cooldown_s: float = 600.0
    prior: VariancePrior = field(default_factory=VariancePrior)

    def for_audit(self) -> CanarySettings:
        """Settings of a trial of the last known good version."""
        return replace(self, most=self.audit_most, margin=0.0, bar=self.audit_bar)


class Canary:
    """Trial of one candidate version against one stable version.

    Attributes:
        candidate: weight_version on trial.
        stable: weight_version of all other requests.
        candidate_stats: of the candidate's requests.
        stable_stats: of the stable version's requests meanwhile.
    """

    def __init__(self, candidate: int, stable: int, settings: CanarySettings) -> None:
        self.candidate = candidate
        self.stable = stable
        self._settings = settings
        self._looks = self._reached = 0
        self._reason: str | None = None
        self._comparison: Comparison | None = None
        self.candidate_stats = AcceptanceStats()
        self.stable_stats = AcceptanceStats()

    def observe(self, outcome: DraftOutcome) -> CanaryAction | None:
        """Count a finished request and decide; None: go on. Other versions are ignored."""
        if outcome.weight_version == self.stable:
            self.stable_stats.add(outcome)
        elif outcome.weight_version == self.candidate:
            if outcome.failed:
                self._reason = "its drafts failed"
                return CanaryAction.ROLL_BACK
            self.candidate_stats.add(outcome)
        else:
            return None
        return self._look() or self._compare_activity()

    def _compare_activity(self) -> CanaryAction | None:
        """Decide a trial in which one slot rarely drafts, so that no looks come.

        The goodput controller drafts with what pays: weights that it avoids are worse.
        """
        if self._alone_active(self.candidate_stats, self.stable_stats):
            self._reason = "the stable draft hardly ever drafts"
            return CanaryAction.PROMOTE
        if self._alone_active(self.stable_stats, self.candidate_stats):
            self._reason = "it hardly ever drafts"
            return CanaryAction.ROLL_BACK
        return None

    def _alone_active(self, active: AcceptanceStats, idle: AcceptanceStats) -> bool:
        needed, ended = self._settings.most, idle.requests + idle.undrafted
        if active.requests < needed or ended < needed:
            return False
        if active.drafted_share >= _ACTIVE_FROM and idle.drafted_share < _IDLE_BELOW:
            return True
        expected = active.drafted_share * ended  # of the idle slot, if both drafted as often
        return expected >= _TIMES_RARER * max(idle.requests, 1)

    def _look(self) -> CanaryAction | None:
        settings = self._settings
        reached = min(self.candidate_stats.requests, self.stable_stats.requests)
        if reached < settings.least or reached == self._reached:
            return None
        self._looks, self._reached = self._looks + 1, reached
        found = self._comparison = compare_sequentially(
            self.candidate_stats, self.stable_stats, settings.error, settings.scale, settings.prior
        )
        if found.upper < 0.0:
            return CanaryAction.ROLL_BACK
        if found.lower > -settings.margin:
            return CanaryAction.PROMOTE
        if found.upper < settings.bar:
            return CanaryAction.ROLL_BACK
        if reached < settings.most:
            return None
        return CanaryAction.PROMOTE if found.difference >= 0.0 else CanaryAction.ROLL_BACK

    @property
    def proven(self) -> bool:
        """Whether a promoted candidate was shown to be better, not only no worse."""
        if self._reason is not None:
            return True  # the stable draft was not worth drafting with
        return self._comparison is not None and self._comparison.lower > 0.0

    @property
    def disproven(self) -> bool:
        """Whether a candidate that was rolled back was shown to be worse, not only no better."""
        return self._comparison is not None and self._comparison.upper < 0.0

    def stats(self) -> Decision:
        """Figures of the trial so far."""
        candidate, stable = self.candidate_stats, self.stable_stats
        figures: Decision = {
            "canary_requests": candidate.requests,
            "stable_requests": stable.requests,
            "canary_acceptance": rounded(candidate.rate),
            "stable_acceptance": rounded(stable.rate),
            "looks": self._looks,
            **interval(self._comparison),
        }
        if candidate.undrafted:
            figures["canary_silent"] = candidate.undrafted
        if stable.undrafted:
            figures["stable_silent"] = stable.undrafted
        if self._reason:
            figures["reason"] = self._reason
        return figures


class PromotionWatch:
    """Comparison of a promoted version with its predecessor's requests during the canary.

    A comparison with the past gives only a suspicion: reason for another trial, at the same
    time, of the predecessor against the version.

    Attributes:
        version: weight_version that was promoted.
        after: its requests since.
    """

    def __init__(self, version: int, before: AcceptanceStats, settings: CanarySettings) -> None:
        self.version = version
        self._before = before
        self._settings = settings
        self._looks = 0
        self._comparison: Comparison | None = None
        self.after = AcceptanceStats()

    def observe(self, outcome: DraftOutcome) -> bool:
        """Count a finished request; True if the version is suspected to be worse."""
        if outcome.weight_version != self.version:
            return False
        self.after.add(outcome)
        looks = self._settings.watch
        if self._looks >= len(looks) or self.after.requests < looks[self._looks]:
            return False
        self._looks += 1
        error = self._settings.error / len(looks)
        self._comparison = compare(self.after, self._before, error, self._settings.prior)
        return self._comparison.upper < -self._settings.margin

    @property
    def ended(self) -> bool:
        """Whether all looks have been taken."""
        return self._looks >= len(self._settings.watch)

    def stats(self) -> Decision:
        """Figures so far."""
        return {
            "requests": self.after.requests,
            "acceptance": rounded(self.after.rate),
            "acceptance_before": rounded(self._before.rate),
            **interval(self._comparison),
        }


def interval(found: Comparison | None) -> Decision:
    """The figures of a comparison; none before the first."""
    if found is None:
        return {}
    return {
        "difference": rounded(found.difference),
        "difference_lower_bound": rounded(found.lower),
        "difference_upper_bound": rounded(found.upper),
    }


def rounded(value: float) -> float | None:
    """Four decimals; None if the value is not finite."""
    return round(value, 4) if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class CanaryInstruction:
    """An action on an expert's version, with the stats that led to it."""

    action: CanaryAction
    expert: str
    version: int
    stats: Decision


@dataclass(slots=True)
class _Expert:
    """Counts since the start, and what is being compared."""

    total: AcceptanceStats = field(default_factory=AcceptanceStats)
    canary: Canary | None = None
    watch: PromotionWatch | None = None


class CanaryMonitor:
    """The trials of all experts: outcomes in, instructions out."""

    def __init__(self, experts: Iterable[str], settings: CanarySettings | None = None) -> None:
        self._settings = settings or CanarySettings()
        self._experts = {expert: _Expert() for expert in experts}

    def add_expert(self, expert: str) -> None:
        """Count the outcomes of a further expert."""
        self._experts[expert] = _Expert()

    def begin_trial(self, expert: str, candidate: int, stable: int, *, audit: bool = False) -> None:
        """Start the trial of a candidate in place of an earlier one.

        Args:
            expert: name.
            candidate: weight_version on trial.
            stable: weight_version of all other requests.
            audit: whether the candidate is the last known good version, see CanarySettings.
        """
        settings = self._settings.for_audit() if audit else self._settings
        self._experts[expert].canary = Canary(candidate, stable, settings)

    def end_trial(self, expert: str) -> None:
        """End a trial; there is no candidate any more."""
        self._experts[expert].canary = None

    def promote(self, expert: str) -> None:
        """End a trial by promotion, and watch the version if its predecessor drafted enough."""
        own = self._experts[expert]
        if own.canary is not None:
            before, own.watch = own.canary.stable_stats, None
            if before.requests >= self._settings.least:
                own.watch = PromotionWatch(own.canary.candidate, before, self._settings)
        own.canary = None

    def reset(self, expert: str) -> None:
        """Compare nothing: other weights have become stable without a trial."""
        self._experts[expert].canary = self._experts[expert].watch = None

    def is_significant(self, expert: str, action: CanaryAction) -> bool:
        """Whether the stats show beyond chance that an action on a candidate is right."""
        canary = self._experts[expert].canary
        if canary is None:
            return False
        return canary.proven if action is CanaryAction.PROMOTE else canary.disproven

    def stats(self, expert: str) -> Decision:
        """Figures of an expert's trial; empty if there is none."""
        canary = self._experts[expert].canary
        return {} if canary is None else canary.stats()

    def observe(self, outcome: DraftOutcome) -> CanaryInstruction | None:
        """Count a finished request; the instruction that follows, if any.

        Outcomes of unknown experts or with impossible counts are ignored.
        """
        own = self._experts.get(outcome.expert)
        if own is None or not outcome.possible:
            return None
        if not outcome.failed:
            own.total.add(outcome)
        name, canary, watch = outcome.expert, own.canary, own.watch
        if canary is not None:
            if watch is not None and outcome.weight_version == watch.version:
                watch.after.add(outcome)  # it is compared once no other version is on trial
            action = canary.observe(outcome)
            if action is None:
                return None
            return CanaryInstruction(action, name, canary.candidate, canary.stats())
        if watch is not None:
            suspected = watch.observe(outcome)
            if suspected or watch.ended:
                own.watch = None
            if suspected:
                action = CanaryAction.TRY_PREVIOUS
                return CanaryInstruction(action, name, watch.version, watch.stats())
        return None

    def counts(self, expert: str) -> dict[str, int]:
        """Drafted requests since the start, their rounds, and rounds whose first was accepted."""
        own = self._experts[expert]
        canary = own.canary  # another thread may end it meanwhile
        return {
            "requests": own.total.requests,
            "rounds": own.total.rounds,
            "accepted": own.total.accepted,
            "canary_requests": 0 if canary is None else canary.candidate_stats.requests,
        }
