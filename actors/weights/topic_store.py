"""Versions of one topic on disk; each change is written before it takes effect."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.actors.atomic_file import replace_text
from paceline.actors.weights.flat_weights import FlatWeights, load_safetensors, save_safetensors
from paceline.actors.weights.history import (
    HISTORY_NAME,
    Decision,
    append_decision,
    decision_time,
    finite,
    read_decisions,
)
from paceline.actors.weights.versions import TopicVersions

logger = logging.getLogger(__name__)


class WeightFiles:
    """Files of all topics' versions, in a folder per fingerprint; written by one process."""

    def __init__(self, directory: str | Path, fingerprints: Mapping[str, str]) -> None:
        """Open every topic.

        Args:
            directory: of all versions.
            fingerprints: topic to the fingerprint of its models.
        """
        self._directory = Path(directory)
        self._roots: dict[str, Path] = {}
        for topic, fingerprint in fingerprints.items():
            self.open(topic, fingerprint)

    def open(self, topic: str, fingerprint: str) -> None:
        """Create a topic's folder and remove what a killed writer left incomplete."""
        self._roots[topic] = self._directory / fingerprint
        folder = self._folder(topic)
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(".*.partial"):
            partial.unlink(missing_ok=True)

    def manifest(self, topic: str) -> Mapping[str, object]:
        """The manifest last written; empty if there is none or it is unreadable."""
        try:
            manifest = json.loads((self._folder(topic) / "manifest.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return manifest if isinstance(manifest, dict) else {}

    def write_manifest(self, topic: str, manifest: Mapping[str, object]) -> None:
        """Replace the manifest atomically."""
        text = json.dumps(finite(manifest), allow_nan=False)
        path = self._folder(topic) / "manifest.json"
        replace_text(path, text)

    def versions(self, topic: str) -> list[int]:
        """Versions that have files, ascending."""
        stems = [path.stem for path in self._folder(topic).glob("*.safetensors")]
        return sorted(int(stem) for stem in stems if stem.isdigit())

    def write(self, topic: str, version: int, flat: FlatWeights) -> None:
        """Write a version's weights atomically."""
        save_safetensors(flat, self._path(topic, version))

    def read(self, topic: str, version: int) -> FlatWeights | None:
        """A version's weights; None if they cannot be read."""
        try:
            return load_safetensors(self._path(topic, version))
        except Exception:
            logger.warning("weights %s %d cannot be read", topic, version, exc_info=True)
            return None

    def remove(self, topic: str, versions: Iterable[int]) -> None:
        """Remove files; missing ones are ignored."""
        for version in versions:
            self._path(topic, version).unlink(missing_ok=True)

    def prune(self, topic: str, keep: int, needed: Container[int] = ()) -> None:
        """Remove all but the newest ``keep`` versions and the needed ones."""
        old = self.versions(topic)[: -max(keep, 1)]
        self.remove(topic, (version for version in old if version not in needed))

    def append_history(self, topic: str, decision: Decision) -> None:
        """Append a decision on a topic."""
        append_decision(self._roots[topic] / HISTORY_NAME, decision)

    def read_history(self, limit: int) -> list[Decision]:
        """The last ``limit`` decisions on all topics, oldest first."""
        roots = dict.fromkeys(self._roots.values())
        found = [d for root in roots for d in read_decisions(root / HISTORY_NAME, limit)]
        return sorted(found, key=decision_time)[-limit:]

    def _folder(self, topic: str) -> Path:
        return self._roots[topic] / topic

    def _path(self, topic: str, version: int) -> Path:
        return self._folder(topic) / f"{version}.safetensors"


@dataclass(frozen=True, slots=True)
class RestoredWeights:
    """Weights of both slots after a start, and the decision that it took, if any."""

    stable: FlatWeights | None = None
    candidate: FlatWeights | None = None
    decision: Decision | None = None


class TopicStore:
    """Version numbers and files of a topic.

    Attributes:
        state: the version numbers; those on disk after :meth:`restore`.
    """

    def __init__(
        self,
        files: WeightFiles,
        topic: str,
        keep: int,
        *,
        canary: bool,
        initial: Callable[[], FlatWeights | None] = lambda: None,
    ) -> None:
        """Open a topic.

        Args:
            files: of all topics.
            topic: name.
            keep: files kept, beside those in use.
            canary: whether new weights go on trial first.
            initial: reads the weights of version 0; None if they are unknown here.
        """
        self._files = files
        self._topic = topic
        self._keep = keep
        self._canary = canary
        self._initial = initial
        self.state = TopicVersions()

    def commit(
        self,
        state: TopicVersions,
        decision: Decision,
        new: tuple[int, FlatWeights] | None = None,
    ) -> None:
        """Write new weights, if any, then the manifest; then change the state.

        A kill in between leaves the old state, and perhaps a complete newer file for
        :meth:`restore`, which takes the newest file for the stable version if no manifest is there.
        """
        if new is not None:
            if not self._files.manifest(self._topic):
                self._files.write_manifest(self._topic, self.state.manifest())
            self._files.write(self._topic, *new)
        self._files.write_manifest(self._topic, {**state.manifest(), "decision": {**decision}})
        self._files.remove(self._topic, state.withdrawn)
        self._files.prune(self._topic, self._keep, state.kept)
        self.state = state.cleaned()

    def read(self, version: int) -> FlatWeights | None:
        """The weights of a version; None if they cannot be read."""
        return self._files.read(self._topic, version)

    def versions(self) -> list[int]:
        """Versions that have files, ascending."""
        return self._files.versions(self._topic)

    def restore(self) -> RestoredWeights:
        """Restore the state before the restart.

        Weights that were written but not announced are announced now, on trial if there is a
        canary. If the stable ones cannot be read, older ones replace them under a new number,
        since drafts may have the old one; the initial ones if nothing else can be read, so that
        running drafts and restarted ones serve the same.
        """
        manifest = self._files.manifest(self._topic)
        state = TopicVersions.of(manifest)
        self._files.remove(self._topic, state.withdrawn)
        self.state = state = state.cleaned()
        files = self.versions()
        highest = max([state.version, *files])
        late = [version for version in files if version > state.version]
        if "stable" not in manifest:  # lost: the newest file is the stable version
            state, late = TopicVersions(highest, highest, last_known_good=highest), []
        elif late and not self._canary:
            state = replace(state, stable=highest, candidate=None, candidate_from=None)
            state = replace(state, last_known_good=highest, unproven=0, audit=False)
            late = []
        self.state = replace(state, version=highest)
        found = self._restore_stable(files)
        if found.decision is not None:
            return found
        return self._restore_candidate(found.stable, late)

    def _restore_stable(self, files: Sequence[int]) -> RestoredWeights:
        wanted = self.state.stable
        version, flat = self._newest([version for version in files if version <= wanted])
        if flat is None and wanted:  # versions never fall
            logger.warning(
                "no readable weights of %s; its versions go on from %d", self._topic, wanted
            )
            flat = self._read_initial()
        if flat is None:
            return RestoredWeights()
        if version == wanted:
            return RestoredWeights(flat)
        number = self.state.version + 1
        decision: Decision = {
            "outcome": "restored",
            "version": number,
            "restored_from": version,
        }
        self.commit(self.state.published(number), decision, (number, flat))
        return RestoredWeights(flat, None, decision)

    def _restore_candidate(
        self, stable: FlatWeights | None, late: Sequence[int]
    ) -> RestoredWeights:
        if late:
            version, flat = self._newest(late)
            if flat is not None:
                state = replace(self.state.on_trial(version), version=self.state.version)
                decision = _late(version, self.state.stable)
                self.commit(state, decision)
                return RestoredWeights(stable, flat, decision)
        version = self.state.candidate or 0
        if not version:
            return RestoredWeights(stable)
        flat = self.read(version) if self._canary else None
        if flat is not None:
            return RestoredWeights(stable, flat)
        reason = "its weights cannot be read" if self._canary else "there is no canary any more"
        decision = {
            "outcome": "rolled_back",
            "version": version,
            "reason": reason,
            "parent": self.state.stable,
        }
        self.commit(self.state.rolled_back(), decision)
        return RestoredWeights(stable, None, decision)

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


def _late(version: int, stable: int) -> Decision:
    reason = "written before a restart, announced after it"
    return {
        "outcome": "published",
        "canary": True,
        "version": version,
        "parent": stable,
        "reason": reason,
    }
