"""All topics' canaries, and what promoted versions do afterwards. Pure: outcomes in, steps out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from paceline.actors.weights.draft_outcomes import (
    Comparison,
    DraftOutcome,
    Spread,
    Tally,
    compare,
)

# A slot is silent where fewer of its requests were drafted for; the other one speaks from so many
# on. Far apart, so that a topic that both slots draft for now and then is not decided by chance.
_SILENT_BELOW = 0.25
_SPEAKS_FROM = 0.5


class Verdict(StrEnum):
    """What is to be done with a candidate."""

    WAIT = "wait"
    PROMOTE = "promote"
    ROLL_BACK = "roll back"


@dataclass(frozen=True, slots=True)
class CanarySettings:
    """How candidates are judged on live requests.

    Attributes:
        looks: at how many requests of the candidate, and at least as many of the stable draft;
            growing.
        error: chance of a wrong decision to either side, over all looks but the last one's mean.
        margin: acceptance by which a candidate may be worse and still be promoted; the gate has
            shown before that it is better on held-out records.
        bar: a candidate that is shown not to be better by so much goes, unless it was shown to be
            better at all.
        watch: the looks, in requests, at a promoted version, which is compared with what its
            predecessor did during the canary.
        audit_after: promotions in a row that were not shown to be better, after which the last
            version that was (the anchor) is tried against the stable one: each may have been worse
            by less than a trial shows, and what each may lose would add up.
        audit_looks: of such a trial, which has no margin: the better of the two is stable.
        audit_bar: the bar of such a trial: an anchor that would bring less is not waited for.
        least_trial_s: that a candidate which nobody has judged yet is left on trial, seconds.
        rest_s: in which a topic takes no candidate after its second rollback in a row, seconds;
            twice as long after each further one.
        longest_rest_s: at most.
        spread: see Spread.
    """

    looks: tuple[int, ...] = (4, 8, 16, 32)
    error: float = 0.05
    margin: float = 0.03
    bar: float = 0.0
    watch: tuple[int, ...] = (16, 64, 256)
    audit_after: int = 3
    audit_looks: tuple[int, ...] = (4, 8, 16, 32, 64)
    audit_bar: float = 0.05
    least_trial_s: float = 60.0
    rest_s: float = 30.0
    longest_rest_s: float = 600.0
    spread: Spread = field(default_factory=Spread)

    def of_an_audit(self) -> CanarySettings:
        """How an anchor is judged against the stable version."""
        return replace(self, looks=self.audit_looks, margin=0.0, bar=self.audit_bar)


class Canary:
    """The trial of one candidate version against one stable version."""

    def __init__(self, candidate: int, stable: int, settings: CanarySettings) -> None:
        """Begin without evidence.

        Args:
            candidate: weight_version on trial.
            stable: weight_version of all other requests.
            settings: see CanarySettings.
        """
        self.candidate = candidate
        self.stable = stable
        self._settings = settings
        self._looks = 0
        self._reason: str | None = None
        self._comparison: Comparison | None = None
        self.on_trial = Tally()
        self.others = Tally()

    def observe(self, outcome: DraftOutcome) -> Verdict:
        """Take a finished request; those of other versions say nothing."""
        if outcome.weight_version == self.stable:
            self.others.add(outcome)
        elif outcome.weight_version == self.candidate:
            if outcome.failed:
                self._reason = "its drafts failed"
                return Verdict.ROLL_BACK
            self.on_trial.add(outcome)
        else:
            return Verdict.WAIT
        verdict = self._look()
        return self._listen() if verdict is Verdict.WAIT else verdict

    def _listen(self) -> Verdict:
        """Decide a trial in which one slot hardly ever drafts, so that no looks come.

        The controller drafts with what pays: weights that it leaves alone are the worse ones.
        """
        if self._speaks_alone(self.on_trial, self.others):
            self._reason = "the stable draft hardly ever drafts"
            return Verdict.PROMOTE
        if self._speaks_alone(self.others, self.on_trial):
            self._reason = "it hardly ever drafts"
            return Verdict.ROLL_BACK
        return Verdict.WAIT

    def _speaks_alone(self, one: Tally, other: Tally) -> bool:
        enough = self._settings.looks[-1]
        if one.requests < enough or other.requests + other.silent < enough:
            return False
        return one.drafted_share >= _SPEAKS_FROM and other.drafted_share < _SILENT_BELOW

    def _look(self) -> Verdict:
        looks = self._settings.looks
        reached = min(self.on_trial.requests, self.others.requests)
        if self._looks >= len(looks) or reached < looks[self._looks]:
            return Verdict.WAIT
        self._looks += 1
        error = self._settings.error / len(looks)
        found = compare(self.on_trial, self.others, error, self._settings.spread)
        self._comparison = found
        if found.upper < 0.0:
            return Verdict.ROLL_BACK
        if found.lower > -self._settings.margin:
            return Verdict.PROMOTE
        if found.upper < self._settings.bar:  # it may be the better one, but not by so much
            return Verdict.ROLL_BACK
        if self._looks < len(looks):
            return Verdict.WAIT
        return Verdict.PROMOTE if found.difference >= 0.0 else Verdict.ROLL_BACK

    @property
    def proven(self) -> bool:
        """Whether the candidate, promoted, was shown to be better, and not only to be no worse."""
        if self._reason is not None:
            return True  # the stable draft was not worth drafting with
        return self._comparison is not None and self._comparison.lower > 0.0

    @property
    def disproven(self) -> bool:
        """Whether the candidate, rolled back, was shown to be worse, and not only not better."""
        return self._comparison is not None and self._comparison.upper < 0.0

    def figures(self) -> dict[str, Any]:
        """The evidence so far, as JSON can hold it."""
        return {
            "canary_requests": self.on_trial.requests,
            "stable_requests": self.others.requests,
            "canary_acceptance": rounded(self.on_trial.rate),
            "stable_acceptance": rounded(self.others.rate),
            **({"canary_silent": self.on_trial.silent} if self.on_trial.silent else {}),
            **({"stable_silent": self.others.silent} if self.others.silent else {}),
            "looks": self._looks,
            **interval(self._comparison),
            **({"reason": self._reason} if self._reason else {}),
        }


class Watch:
    """A promoted version against what its predecessor did during the canary.

    This compares with the past, so what it finds is a suspicion: reason enough for another
    trial, at the same time, of the predecessor against the version.
    """

    def __init__(self, version: int, before: Tally, settings: CanarySettings) -> None:
        """Begin without evidence.

        Args:
            version: that was promoted.
            before: the predecessor's requests.
            settings: see CanarySettings.
        """
        self.version = version
        self._before = before
        self._settings = settings
        self._looks = 0
        self._comparison: Comparison | None = None
        self.after = Tally()

    def observe(self, outcome: DraftOutcome) -> bool:
        """Take a finished request; True where the version is suspected to be the worse one."""
        if outcome.weight_version != self.version:
            return False
        self.after.add(outcome)
        looks = self._settings.watch
        if self._looks >= len(looks) or self.after.requests < looks[self._looks]:
            return False
        self._looks += 1
        error = self._settings.error / len(looks)
        self._comparison = compare(self.after, self._before, error, self._settings.spread)
        return self._comparison.upper < -self._settings.margin

    @property
    def ended(self) -> bool:
        """Whether all looks have been taken."""
        return self._looks >= len(self._settings.watch)

    def figures(self) -> dict[str, Any]:
        """The evidence so far, as JSON can hold it."""
        return {
            "requests": self.after.requests,
            "acceptance": rounded(self.after.rate),
            "acceptance_before": rounded(self._before.rate),
            **interval(self._comparison),
        }


def interval(found: Comparison | None) -> dict[str, float | None]:
    """A comparison as JSON can hold it; empty before the first."""
    if found is None:
        return {}
    return {
        "difference": rounded(found.difference),
        "difference_lower_bound": rounded(found.lower),
        "difference_upper_bound": rounded(found.upper),
    }


def rounded(value: float) -> float | None:
    """Four digits; None where the figure is not finite."""
    return round(value, 4) if math.isfinite(value) else None


class Action(StrEnum):
    """What the registry is to do about a topic."""

    PROMOTE = "promote"
    ROLL_BACK = "roll back"
    TRY_PREVIOUS = "try previous"


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction, with the figures that it rests on."""

    action: Action
    expert: str
    version: int
    figures: dict[str, Any]


@dataclass(slots=True)
class _Expert:
    """What is known of an expert's live drafts."""

    live: Tally = field(default_factory=Tally)
    canary: Canary | None = None
    watch: Watch | None = None


class Trials:
    """Takes the outcomes of finished requests and says when a trial is decided."""

    def __init__(self, experts: Iterable[str], settings: CanarySettings | None = None) -> None:
        """Begin without evidence.

        Args:
            experts: of which outcomes count.
            settings: see CanarySettings.
        """
        self._settings = settings or CanarySettings()
        self._experts = {expert: _Expert() for expert in experts}

    def enlist(self, expert: str) -> None:
        """Take the outcomes of a further expert."""
        self._experts[expert] = _Expert()

    def begin(self, expert: str, candidate: int, stable: int, *, audit: bool = False) -> None:
        """A candidate is announced; what an earlier one has shown is forgotten.

        Args:
            expert: whose.
            candidate: weight_version on trial.
            stable: weight_version of all other requests.
            audit: whether the candidate is the anchor, see CanarySettings.
        """
        settings = self._settings.of_an_audit() if audit else self._settings
        self._experts[expert].canary = Canary(candidate, stable, settings)

    def end(self, expert: str) -> None:
        """There is no candidate any more."""
        self._experts[expert].canary = None

    def promoted(self, expert: str) -> None:
        """The candidate is stable: from now on it is watched against its predecessor.

        A predecessor that hardly drafted has left nothing to compare with.
        """
        own = self._experts[expert]
        if own.canary is not None:
            before, own.watch = own.canary.others, None
            if before.requests >= self._settings.looks[0]:
                own.watch = Watch(own.canary.candidate, before, self._settings)
        own.canary = None

    def forget(self, expert: str) -> None:
        """Other weights are stable, for reasons of their own: nothing is compared with them."""
        self._experts[expert].canary = self._experts[expert].watch = None

    def shown(self, expert: str, action: Action) -> bool:
        """Whether what is done to an expert's candidate was shown to be right, beyond chance."""
        canary = self._experts[expert].canary
        if canary is None:
            return False
        return canary.proven if action is Action.PROMOTE else canary.disproven

    def figures(self, expert: str) -> dict[str, Any]:
        """The evidence on an expert's candidate; empty where there is none."""
        canary = self._experts[expert].canary
        return {} if canary is None else canary.figures()

    def observe(self, outcome: DraftOutcome) -> Step | None:
        """Take a finished request; what is to be done now, if anything.

        Outcomes of unknown experts, or with counts that cannot be, are left out.
        """
        own = self._experts.get(outcome.expert)
        if own is None or not outcome.possible:
            return None
        if not outcome.failed:
            own.live.add(outcome)
        if own.canary is not None:
            verdict = own.canary.observe(outcome)
            if verdict is Verdict.WAIT:
                return None
            action = Action.PROMOTE if verdict is Verdict.PROMOTE else Action.ROLL_BACK
            return Step(action, outcome.expert, own.canary.candidate, own.canary.figures())
        if own.watch is not None:
            suspected = own.watch.observe(outcome)
            watch = own.watch
            if suspected or watch.ended:
                own.watch = None
            if suspected:
                figures = watch.figures()
                return Step(Action.TRY_PREVIOUS, outcome.expert, watch.version, figures)
        return None

    def live(self, expert: str) -> dict[str, int]:
        """Finished requests since the start, their rounds, and rounds whose first was accepted."""
        own = self._experts[expert]
        canary = own.canary  # another thread may end it meanwhile
        requests = 0 if canary is None else canary.on_trial.requests
        return {
            "requests": own.live.requests,
            "rounds": own.live.rounds,
            "accepted": own.live.accepted,
            "canary_requests": requests,
        }
