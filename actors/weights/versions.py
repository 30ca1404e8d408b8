"""Version numbers of a topic, and their manifest. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from paceline.actors.weights.drift import DriftStatus


class VersionChangedError(ValueError):
    """The served version is not the one that the caller expects."""


@dataclass(frozen=True, slots=True)
class TopicVersions:
    """Version numbers of a topic; every change returns a new object.

    Attributes:
        version: the highest number ever used; it never falls.
        stable: of all requests outside the canary; 0 are the initial weights.
        candidate: on trial, None if there is none.
        previous: stable before the present one; None before the first change.
        candidate_from: the earlier version that the candidate is a copy of, if it is one.
        withdrawn: candidates that were rolled back and may still have files.
        last_known_good: the last stable version that was shown to be better than the one before
            it here, or was set by hand.
        unproven: promotions since then, or since the last audit, not shown to be better.
        audit: whether the candidate is the last known good version, on trial after these.
    """

    version: int = 0
    stable: int = 0
    candidate: int | None = None
    previous: int | None = None
    withdrawn: tuple[int, ...] = ()
    candidate_from: int | None = None
    last_known_good: int = 0
    unproven: int = 0
    audit: bool = False

    def published(self, version: int) -> TopicVersions:
        """Make a new version stable without a trial; withdraw a candidate."""
        return replace(
            self._without_candidate(),
            version=version,
            stable=version,
            previous=self.stable,
            last_known_good=version,
            unproven=0,
        )

    def on_trial(
        self, version: int, candidate_from: int | None = None, *, audit: bool = False
    ) -> TopicVersions:
        """Put a new candidate on trial in place of another one."""
        return replace(
            self._without_candidate(),
            version=version,
            candidate=version,
            candidate_from=candidate_from,
            audit=audit,
        )

    def promoted(self, *, proven: bool = False) -> TopicVersions:
        """Make the candidate stable.

        Args:
            proven: whether it was shown to be better than the stable version. It is then the
                last known good one if the stable version was: to be better than an unproven one
                says little. An earlier version is the last known good one if it was before, or
                if it beats that one.
        """
        assert self.candidate is not None
        last_known_good, unproven = self.last_known_good, self.unproven
        if self.candidate_from is not None:
            if last_known_good in (self.candidate_from, self.stable):
                last_known_good, unproven = self.candidate, 0
        elif not proven:
            unproven += 1
        elif not unproven:
            last_known_good = self.candidate
        return replace(
            self,
            stable=self.candidate,
            previous=self.stable,
            candidate=None,
            candidate_from=None,
            last_known_good=last_known_good,
            unproven=unproven,
            audit=False,
        )

    def rolled_back(self, *, shown: bool = False) -> TopicVersions:
        """Withdraw the candidate; its number is not used again.

        Args:
            shown: whether it was shown to be worse than the stable version, which after an audit
                becomes the last known good one. Otherwise that stays: a loss by chance would be
                final.
        """
        found = self._without_candidate()
        if not self.audit:
            return found
        return replace(
            found, last_known_good=self.stable if shown else self.last_known_good, unproven=0
        )

    def with_stable_known_good(self) -> TopicVersions:
        """Make the stable version the last known good one, whose weights cannot be read."""
        return replace(self, last_known_good=self.stable, unproven=0)

    def cleaned(self) -> TopicVersions:
        """Forget withdrawn versions once their files are removed."""
        return replace(self, withdrawn=())

    def _without_candidate(self) -> TopicVersions:
        if self.candidate is None:
            return self
        withdrawn = (*self.withdrawn, self.candidate)
        return replace(self, candidate=None, withdrawn=withdrawn, candidate_from=None, audit=False)

    @property
    def newest(self) -> int:
        """The newest served version: the candidate, or the stable one if there is none."""
        return self.stable if self.candidate is None else self.candidate

    @property
    def kept(self) -> set[int]:
        """Versions that need their files."""
        return {v for v in (self.stable, self.candidate, self.previous, self.last_known_good) if v}

    def manifest(self) -> dict[str, object]:
        """JSON-able fields."""
        return asdict(self)

    @classmethod
    def of(cls, manifest: Mapping[str, object]) -> TopicVersions:
        """Parse a manifest; missing fields follow from ``version``."""
        version = _number(manifest.get("version")) or 0
        stable = _number(manifest.get("stable"))
        stable = version if stable is None else stable
        last_known_good = _number(manifest.get("last_known_good"))
        withdrawn = manifest.get("withdrawn")
        return cls(
            version=version,
            stable=stable,
            candidate=_number(manifest.get("candidate")),
            previous=_number(manifest.get("previous")),
            withdrawn=tuple(
                v for v in (withdrawn if isinstance(withdrawn, list) else ()) if isinstance(v, int)
            ),
            candidate_from=_number(manifest.get("candidate_from")),
            last_known_good=stable if last_known_good is None else last_known_good,
            unproven=_number(manifest.get("unproven")) or 0,
            audit=manifest.get("audit") is True,
        )


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """Versions of a topic and counts of its served drafts, as the registry reports them.

    Attributes:
        stable: weight_version.
        candidate: weight_version on trial, or None.
        restored_from: the earlier version that the candidate is a copy of, or None.
        requests: drafted requests since the registry's start.
        rounds: of these.
        accepted: rounds whose first position was accepted.
        canary_requests: drafted requests of the candidate.
        closed: why no candidate is taken now, None if one is.
        subscribers: processes that load the topic's weights and have polled lately.
        lagging: those of them that have not loaded the topic's present versions.
        drift: of the live acceptance.
    """

    stable: int = 0
    candidate: int | None = None
    restored_from: int | None = None
    requests: int = 0
    rounds: int = 0
    accepted: int = 0
    canary_requests: int = 0
    closed: str | None = None
    subscribers: int = 0
    lagging: tuple[str, ...] = ()
    drift: DriftStatus = field(default_factory=DriftStatus)


@dataclass(frozen=True, slots=True)
class RegistryMetrics:
    """Figures for monitoring.

    Attributes:
        topics: status by topic.
        decisions: counts since the start, by topic and outcome, see DecisionLog.
        gates: by topic, the gate's last expected acceptance of candidate and served draft.
    """

    topics: dict[str, TopicStatus]
    decisions: dict[tuple[str, str], int]
    gates: dict[str, tuple[float | None, float | None]]


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
