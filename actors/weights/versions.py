"""Which weight versions of a topic there are, and what a manifest says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


class VersionChanged(ValueError):  # noqa: N818 - a state of affairs, named as callers say it
    """Other weights are served than the caller believes."""


@dataclass(frozen=True, slots=True)
class TopicVersions:
    """A topic's version numbers; each change is a new object with the numbers after it.

    Attributes:
        version: the highest number that was ever given out; it never falls.
        stable: that of all requests but the canary's; 0 are the initial weights.
        candidate: on trial, None where there is none.
        previous: stable before the present one; None before the first change.
        candidate_from: where the candidate is an earlier version under a new number, which one.
        withdrawn: candidates that were rolled back and whose files may still be there.
        anchor: the last stable version that was shown to be better than the anchor before it, or
            that somebody asked for.
        unproven: promotions since then, or since the anchor was last on trial, that were not
            shown to be better.
        audit: whether the anchor is on trial for that.
    """

    version: int = 0
    stable: int = 0
    candidate: int | None = None
    previous: int | None = None
    withdrawn: tuple[int, ...] = ()
    candidate_from: int | None = None
    anchor: int = 0
    unproven: int = 0
    audit: bool = False

    def published(self, version: int) -> TopicVersions:
        """New stable weights, without a trial; a candidate goes."""
        return replace(
            self._without_candidate(),
            version=version,
            stable=version,
            previous=self.stable,
            anchor=version,
            unproven=0,
        )

    def on_trial(
        self, version: int, candidate_from: int | None = None, *, audit: bool = False
    ) -> TopicVersions:
        """A new candidate, in place of one that there may be."""
        return replace(
            self._without_candidate(),
            version=version,
            candidate=version,
            candidate_from=candidate_from,
            audit=audit,
        )

    def promoted(self, *, proven: bool = False) -> TopicVersions:
        """The candidate becomes stable.

        Args:
            proven: whether it was shown to be better than the stable version. It is the anchor
                then where the stable version was that: to be better than one that was only no
                worse says little. An earlier version that comes back is the anchor where it was
                that, or beats it.
        """
        assert self.candidate is not None
        anchor, unproven = self.anchor, self.unproven
        if self.candidate_from is not None:
            if anchor in (self.candidate_from, self.stable):
                anchor, unproven = self.candidate, 0
        elif not proven:
            unproven += 1
        elif not unproven:
            anchor = self.candidate
        return replace(
            self,
            stable=self.candidate,
            previous=self.stable,
            candidate=None,
            candidate_from=None,
            anchor=anchor,
            unproven=unproven,
            audit=False,
        )

    def rolled_back(self, *, shown: bool = False) -> TopicVersions:
        """The candidate goes; its number is not given out again.

        Args:
            shown: whether it was shown to be worse than the stable version, which takes an
                anchor's place then. Without that the anchor stays: what is lost to it by chance
                would be lost for good.
        """
        found = self._without_candidate()
        if not self.audit:
            return found
        return replace(found, anchor=self.stable if shown else self.anchor, unproven=0)

    def anchored(self) -> TopicVersions:
        """The stable version is the anchor: the one before cannot be read any more."""
        return replace(self, anchor=self.stable, unproven=0)

    def cleaned(self) -> TopicVersions:
        """The files of what was withdrawn are gone."""
        return replace(self, withdrawn=())

    def _without_candidate(self) -> TopicVersions:
        if self.candidate is None:
            return self
        withdrawn = (*self.withdrawn, self.candidate)
        return replace(self, candidate=None, withdrawn=withdrawn, candidate_from=None, audit=False)

    @property
    def newest(self) -> int:
        """The newest that is served: the candidate, or where there is none the stable one."""
        return self.stable if self.candidate is None else self.candidate

    @property
    def kept(self) -> set[int]:
        """Versions whose files must stay."""
        return {v for v in (self.stable, self.candidate, self.previous, self.anchor) if v}

    def manifest(self) -> dict[str, Any]:
        """What is written to disk of it."""
        return asdict(self)

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> TopicVersions:
        """From a manifest; one of an earlier release names only ``version``, which was stable."""
        version = _number(manifest.get("version")) or 0
        stable = _number(manifest.get("stable"))
        stable = version if stable is None else stable
        anchor = _number(manifest.get("anchor"))
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
            anchor=stable if anchor is None else anchor,
            unproven=_number(manifest.get("unproven")) or 0,
            audit=manifest.get("audit") is True,
        )


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
