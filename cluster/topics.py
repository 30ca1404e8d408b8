"""Which topic a trainer gets: by expected gain and by waiting, and who had it last."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.leases import LeaseSettings


@dataclass(slots=True)
class _Topic:
    """Since when it waits, and what the trainer that had it last left to say of it."""

    since: float
    holder: str | None = None
    note: Mapping[str, Any] = field(default_factory=dict)


class TopicBook:
    """What the broker remembers of topics."""

    def __init__(self, settings: LeaseSettings) -> None:
        """Know of none.

        Args:
            settings: ``ageing_s``, ``longest_wait_s`` and ``away`` are used.
        """
        self._settings = settings
        self._topics: dict[str, _Topic] = {}

    def choose(
        self,
        trainer: str,
        gains: Mapping[str, float],
        taken: Collection[str],
        others: Collection[str],
        now: float,
    ) -> str | None:
        """The topic for a trainer, None where none is free.

        The largest gain wins, more the longer the topic has waited; one that has waited for too
        long comes before all that have not, so that none starves.

        Args:
            trainer: that asks.
            gains: topic that it could teach to the gain that it expects; no number: left out.
            taken: topics of other trainers.
            others: trainers that are there beside this one.
            now: monotonic seconds.
        """
        free = {
            topic: gain
            for topic, gain in gains.items()
            if topic not in taken and math.isfinite(gain) and gain >= 0.0
        }

        def weight(topic: str) -> tuple[float, float]:
            known, settings = self._topics.setdefault(topic, _Topic(now)), self._settings
            waited = now - known.since
            due = waited if waited >= settings.longest_wait_s else 0.0
            away = settings.away if known.holder != trainer and known.holder in others else 1.0
            return due, free[topic] * (1.0 + waited / settings.ageing_s) * away

        for topic in gains:  # those that another has now wait from now on, too
            self._topics.setdefault(topic, _Topic(now))
        return max(free, key=weight, default=None)

    def holder(self, topic: str) -> str | None:
        """The trainer whose memory has the last that was learnt of a topic."""
        known = self._topics.get(topic)
        return None if known is None else known.holder

    def ended(
        self, topic: str, trainer: str, now: float, note: Mapping[str, Any] | None = None
    ) -> None:
        """A trainer's round has ended; without a note the one before it stands."""
        before = self._topics.get(topic)
        kept = before.note if before is not None and note is None else note
        self._topics[topic] = _Topic(now, trainer, dict(kept or {}))

    def lost(self, topic: str, now: float) -> None:
        """A trainer's memory of a topic is gone."""
        known = self._topics.setdefault(topic, _Topic(now))
        known.since, known.holder = now, None

    def forget(self, trainer: str) -> None:
        """All memory of a trainer is gone."""
        for known in self._topics.values():
            if known.holder == trainer:
                known.holder = None

    def notes(self, trainer: str) -> dict[str, Mapping[str, Any]]:
        """Topic to what was last said of it, of the topics that this trainer did not have last."""
        return {
            topic: known.note
            for topic, known in self._topics.items()
            if known.holder != trainer and known.note
        }
