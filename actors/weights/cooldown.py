"""When a topic's next candidate may go on trial, after those that live requests disliked. Pure.

A trainer gone bad that publishes as fast as it is rolled back would hold the canary's share of the
requests for ever. So rests between trials grow while one rollback follows the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.history import decision_time
from paceline.actors.weights.versions import TopicVersions

ASKED_FOR = "asked for"  # reason of what somebody did by hand


class NotNow(ValueError):  # noqa: N818 - a state of affairs, named as callers say it
    """The topic takes no candidate at the moment; another time it may."""


class Setbacks:
    """A topic's rollbacks in a row, as its decisions tell them."""

    def __init__(self, decisions: Iterable[Mapping[str, Any]] = ()) -> None:
        """Take up the decisions that there are, oldest first."""
        self.in_a_row = 0
        self._last = -math.inf  # unix seconds
        for decision in decisions:
            self.take(decision)

    def take(self, decision: Mapping[str, Any]) -> None:
        """Count what live requests decided; what was asked for, or found at a start, says nothing.

        An earlier version that wins its trial tells of the later one what a rollback would; one
        that loses tells nothing new.
        """
        if "looks" not in decision or decision.get("reason") == ASKED_FOR:
            return
        outcome, earlier = decision.get("outcome"), decision.get("restored_from") is not None
        if outcome == "rolled_back" or (outcome == "promoted" and earlier):
            self.in_a_row += 1
            self._last = decision_time(decision)
        elif outcome == "promoted":  # no worse is not good yet
            self.in_a_row = 0 if decision.get("proven") else max(self.in_a_row - 1, 0)

    def resting(self, now: float, settings: CanarySettings) -> bool:
        """Whether no candidate may come yet; the first rollback costs no rest.

        Args:
            now: unix seconds; a clock that was set back ends the rest.
            settings: see CanarySettings.
        """
        if self.in_a_row < 2:
            return False
        # the exponent is bounded because a float is
        rest = settings.rest_s * 2.0 ** min(self.in_a_row - 2, 30)
        return 0.0 <= now - self._last < min(rest, settings.longest_rest_s)


class Admission:
    """Says whether a topic takes a new candidate now."""

    def __init__(self, settings: CanarySettings | None) -> None:
        """No topic has any past.

        Args:
            settings: see CanarySettings; None, where nothing goes on trial, takes everything.
        """
        self._settings = settings
        self._setbacks: dict[str, Setbacks] = {}
        self._began: dict[str, tuple[int, float]] = {}  # candidate, unix seconds

    def recall(self, topic: str, decisions: Iterable[Mapping[str, Any]]) -> None:
        """Take up a topic's past decisions, oldest first."""
        self._setbacks[topic] = Setbacks(decisions)

    def take(self, topic: str, decision: Mapping[str, Any]) -> None:
        """Live requests have decided about a topic's candidate; ``decision`` with its time."""
        self._setbacks.setdefault(topic, Setbacks()).take(decision)

    def began(self, topic: str, candidate: int, now: float) -> None:
        """A candidate is on trial, as far as is known since ``now``, unix seconds."""
        if self._began.get(topic, (0, 0.0))[0] != candidate:
            self._began[topic] = candidate, now

    def refusal(self, topic: str, state: TopicVersions, judged: int, now: float) -> str | None:
        """Why no candidate is taken; None where one is.

        Args:
            topic: whose candidate it would be.
            state: of the topic.
            judged: requests that have judged the one on trial.
            now: unix seconds.
        """
        if self._settings is None:
            return None
        if state.candidate is not None:
            if state.candidate_from is not None:
                return "an earlier version is on trial"
            if judged:
                return "live requests judge the one before"
            candidate, since = self._began.get(topic, (0, -math.inf))
            if candidate == state.candidate and 0.0 <= now - since < self._settings.least_trial_s:
                return "the one before has only just gone on trial"
        setbacks = self._setbacks.get(topic)
        if setbacks is not None and setbacks.resting(now, self._settings):
            return f"{setbacks.in_a_row} candidates in a row were rolled back"
        return None
