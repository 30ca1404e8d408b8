"""What the registry's live figures tell the trainer: which topics take a candidate, and drift."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.actors.training.drift import Drift, DriftSettings


class Outlook:
    """The last live figures; a registry that does not answer leaves them as they are."""

    def __init__(self, topics: Iterable[str], settings: DriftSettings) -> None:
        """Begin without figures.

        Args:
            topics: experts whose drift is watched.
            settings: see DriftSettings.
        """
        self._settings = settings
        self._drifts = {topic: Drift(settings) for topic in topics}
        self._live: Mapping[str, Mapping[str, Any]] = {}

    def enlist(self, topic: str) -> None:
        """Watch a further expert."""
        self._drifts[topic] = Drift(self._settings)

    def update(self, live: Mapping[str, Mapping[str, Any]] | None) -> list[str]:
        """Take what ``WeightRegistry.live`` says; returns the topics whose drift begins."""
        if live is None:
            return []
        self._live = live
        began = []
        for topic, drift in self._drifts.items():
            own = live.get(topic)
            if own and drift.update(own["requests"], own["rounds"], own["accepted"]):
                began.append(topic)
        return began

    def drifting(self, topic: str) -> bool:
        """Whether a topic's draft has lost it."""
        return self._drifts[topic].drifting

    def drift_figures(self, topic: str) -> dict[str, Any]:
        """See Drift.figures."""
        return self._drifts[topic].figures()

    def figures(self) -> dict[str, dict[str, Any]]:
        """Per topic, see Drift.figures, and whether it is ``drifting``."""
        drifts = list(self._drifts.items())
        return {topic: drift.figures() | {"drifting": drift.drifting} for topic, drift in drifts}

    def candidate(self, topic: str) -> int | None:
        """The version on trial, None where there is none."""
        version: int | None = self._live.get(topic, {}).get("candidate")
        return version

    def withdrawn(self, topic: str, version: int) -> bool:
        """Whether a version was on trial and has been rolled back."""
        stable = self._live.get(topic, {}).get("stable")
        return stable is not None and version > stable and version != self.candidate(topic)

    def undecided(self, topic: str) -> bool:
        """Whether a trial is under way that a new candidate must not replace.

        One with evidence, which would be thrown away; and one of an earlier version against a
        suspected one, which nobody would begin again.
        """
        own = self._live.get(topic, {})
        if own.get("candidate") is None:
            return False
        return own.get("canary_requests", 0) > 0 or own.get("restored_from") is not None

    def closed(self, topic: str) -> str | None:
        """Why the registry would take no candidate now, None where it would; see Admission."""
        why: str | None = self._live.get(topic, {}).get("closed")
        return why
