"""All topics' canaries, and what promoted versions do afterwards. Pure: outcomes in, steps out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from paceline.actors.weights.canary import Canary, CanarySettings, Verdict, Watch
from paceline.actors.weights.evidence import DraftOutcome, Tally


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
