"""Cooldown of a topic after rollbacks, and whether it takes a candidate now. Pure.

A broken trainer that publishes as fast as it is rolled back would occupy the canary's share of
the requests for ever. So pauses between trials grow with rollbacks in a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.actors.backoff import Backoff
from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.history import Decision, decision_time
from paceline.actors.weights.versions import TopicVersions

MANUAL = "asked for"  # reason of a rollback through the API


class CandidateRefusedError(ValueError):
    """The topic takes no candidate now; it may later."""


class Cooldown:
    """A topic's rollbacks in a row, from its decisions.

    Attributes:
        rollbacks: in a row.
    """

    def __init__(self, decisions: Iterable[Decision] = ()) -> None:
        """Count past decisions, oldest first."""
        self.rollbacks = 0
        self._last = -math.inf  # unix seconds
        for decision in decisions:
            self.add(decision)

    def add(self, decision: Decision) -> None:
        """Count a decision of the canary; manual ones and those of a start are ignored.

        An earlier version that wins its trial counts as a rollback of the later one; one that
        loses counts for nothing.
        """
        if "looks" not in decision or decision.get("reason") == MANUAL:
            return
        outcome, earlier = decision.get("outcome"), decision.get("restored_from") is not None
        if outcome == "rolled_back" or (outcome == "promoted" and earlier):
            self.rollbacks += 1
            self._last = decision_time(decision)
        elif outcome == "promoted":  # no worse does not mean good
            self.rollbacks = 0 if decision.get("proven") else max(self.rollbacks - 1, 0)

    def active(self, now: float, settings: CanarySettings) -> bool:
        """Whether no candidate may come yet; the first rollback costs no pause.

        Args:
            now: unix seconds; a clock that was set back ends the pause.
            settings: see CanarySettings.
        """
        failures = max(self.rollbacks - 1, 0)
        pause_s = Backoff(settings.cooldown_s, settings.max_cooldown_s, failures=failures).delay
        return 0.0 <= now - self._last < pause_s


class CandidateAdmission:
    """Decides whether a topic takes a new candidate now."""

    def __init__(self, settings: CanarySettings | None) -> None:
        """Start without history; without a canary (None) every candidate is taken."""
        self._settings = settings
        self._cooldowns: dict[str, Cooldown] = {}
        self._trials: dict[str, tuple[int, float]] = {}  # topic to candidate, unix seconds

    def load(self, topic: str, decisions: Iterable[Decision]) -> None:
        """Count a topic's past decisions, oldest first."""
        self._cooldowns[topic] = Cooldown(decisions)

    def add(self, topic: str, decision: Decision) -> None:
        """Count a decision of the canary, which has its time."""
        self._cooldowns.setdefault(topic, Cooldown()).add(decision)

    def trial_began(self, topic: str, candidate: int, now: float) -> None:
        """Note the start of a candidate's trial, unix seconds; repeated calls are fine."""
        if self._trials.get(topic, (0, 0.0))[0] != candidate:
            self._trials[topic] = candidate, now

    def refusal(self, topic: str, state: TopicVersions, requests: int, now: float) -> str | None:
        """Why no candidate is taken; None if one is.

        Args:
            topic: of the candidate.
            state: of the topic.
            requests: counted in the present trial.
            now: unix seconds.
        """
        if self._settings is None:
            return None
        if state.candidate is not None:
            if state.candidate_from is not None:
                return "an earlier version is on trial"
            if requests:
                return "the one before is being compared on live requests"
            candidate, since = self._trials.get(topic, (0, -math.inf))
            if candidate == state.candidate and 0.0 <= now - since < self._settings.min_trial_s:
                return "the one before has only just gone on trial"
        cooldown = self._cooldowns.get(topic)
        if cooldown is not None and cooldown.active(now, self._settings):
            return f"{cooldown.rollbacks} candidates in a row were rolled back"
        return None
