"""One topic's versions on disk: each change is written before it counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.actors.weights.flat import FlatWeights
from paceline.actors.weights.store import WeightStore
from paceline.actors.weights.versions import TopicVersions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What a start has found: weights of both slots, and what had to be decided, if anything."""

    stable: FlatWeights | None = None
    candidate: FlatWeights | None = None
    decision: dict[str, Any] | None = None


class Shelf:
    """The version numbers of a topic, and its files."""

    def __init__(
        self,
        store: WeightStore,
        topic: str,
        keep: int,
        *,
        canary: bool,
        initial: Callable[[], FlatWeights | None] = lambda: None,
    ) -> None:
        """Nothing is read yet, see :meth:`restore`.

        Args:
            store: of all topics.
            topic: this one.
            keep: files kept at most, beside those that are in use.
            canary: whether new weights go on trial first.
            initial: reads the weights of version 0; None where they are not known here.
        """
        self._store = store
        self._topic = topic
        self._keep = keep
        self._canary = canary
        self._initial = initial
        self.state = TopicVersions()

    def commit(
        self,
        state: TopicVersions,
        decision: Mapping[str, Any],
        new: tuple[int, FlatWeights] | None = None,
    ) -> None:
        """Write weights, if there are new ones, then the manifest; then take the new state.

        A kill in between leaves the state before, and perhaps a whole file above it, which
        :meth:`restore` finds.
        """
        if new is not None:
            self._store.write(self._topic, *new)
        self._store.write_manifest(self._topic, {**state.manifest(), "decision": {**decision}})
        self._store.remove(self._topic, state.withdrawn)
        self._store.prune(self._topic, self._keep, state.kept)
        self.state = state.cleaned()

    def read(self, version: int) -> FlatWeights | None:
        """The weights of a version; None where they cannot be read."""
        return self._store.read(self._topic, version)

    def versions(self) -> list[int]:
        """Versions of which there are files, ascending."""
        return self._store.versions(self._topic)

    def restore(self) -> Found:
        """Come back as the last life left it.

        Weights that were written whole and not announced are announced now, on trial where there
        is a canary. Where the stable ones cannot be read, older ones take their place under a new
        number, since drafts may have seen the old one; the initial ones where nothing else can be
        read, so that a draft that lives on and one that begins anew serve the same.
        """
        manifest = self._store.manifest(self._topic)
        state = TopicVersions.of(manifest)
        self._store.remove(self._topic, state.withdrawn)
        self.state = state = state.cleaned()
        files = self.versions()
        highest = max([state.version, *files])
        late = [version for version in files if version > state.version]
        if "stable" not in manifest:  # of an earlier release, or lost: the newest is the stable one
            state, late = TopicVersions(highest, highest, anchor=highest), []
        elif late and not self._canary:
            state = replace(state, stable=highest, candidate=None, candidate_from=None)
            state = replace(state, anchor=highest, unproven=0, audit=False)
            late = []
        self.state = replace(state, version=highest)
        found = self._restore_stable(files)
        if found.decision is not None:
            return found
        return self._restore_candidate(found.stable, late)

    def _restore_stable(self, files: Sequence[int]) -> Found:
        wanted = self.state.stable
        version, flat = self._newest([version for version in files if version <= wanted])
        if flat is None and wanted:  # keep counting from where drafts have been
            logger.warning(
                "no readable weights of %s; its versions go on from %d", self._topic, wanted
            )
            flat = self._read_initial()
        if flat is None:
            return Found()
        if version == wanted:
            return Found(flat)
        number = self.state.version + 1
        decision = {"outcome": "restored", "version": number, "restored_from": version}
        self.commit(self.state.published(number), decision, (number, flat))
        return Found(flat, None, decision)

    def _restore_candidate(self, stable: FlatWeights | None, late: Sequence[int]) -> Found:
        if late:
            version, flat = self._newest(late)
            if flat is not None:
                state = replace(self.state.on_trial(version), version=self.state.version)
                decision = _late(version, self.state.stable)
                self.commit(state, decision)
                return Found(stable, flat, decision)
        version = self.state.candidate or 0
        if not version:
            return Found(stable)
        flat = self.read(version) if self._canary else None
        if flat is not None:
            return Found(stable, flat)
        reason = "its weights cannot be read" if self._canary else "there is no canary any more"
        decision = {"outcome": "rolled_back", "version": version, "reason": reason}
        decision["parent"] = self.state.stable
        self.commit(self.state.rolled_back(), decision)
        return Found(stable, None, decision)

    def _newest(self, versions: Sequence[int]) -> tuple[int, FlatWeights | None]:
        for version in sorted(versions, reverse=True):
            flat = self.read(version)
            if flat is not None:
                return version, flat
        return 0, None

    def _read_initial(self) -> FlatWeights | None:
        try:
            return self._initial()
        except Exception:
            logger.warning("initial weights of %s cannot be read", self._topic, exc_info=True)
            return None


def _late(version: int, stable: int) -> dict[str, Any]:
    reason = "written before a restart, announced after it"
    return {
        "outcome": "published",
        "canary": True,
        "version": version,
        "parent": stable,
        "reason": reason,
    }
