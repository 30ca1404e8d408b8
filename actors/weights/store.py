"""One topic's versions on disk: each change is written before it counts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.actors.weights.flat_weights import FlatWeights, load_safetensors, save_safetensors
from paceline.actors.weights.history import (
    HISTORY_NAME,
    append_decision,
    decision_time,
    finite,
    read_decisions,
)
from paceline.actors.weights.versions import TopicVersions

logger = logging.getLogger(__name__)


class WeightStore:
    """Files of one fingerprint per topic; one process writes them."""

    def __init__(self, directory: str | Path, fingerprints: Mapping[str, str]) -> None:
        """Make the folders and remove what a killed writer left half-written.

        Args:
            directory: of all versions.
            fingerprints: topic to the fingerprint of its models.
        """
        self._directory = Path(directory)
        self._roots: dict[str, Path] = {}
        for topic, mark in fingerprints.items():
            self.open(topic, mark)

    def open(self, topic: str, fingerprint: str) -> None:
        """Make a topic's folder, as the constructor does for those that it is given."""
        self._roots[topic] = self._directory / fingerprint
        folder = self._folder(topic)
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(".*.partial"):
            partial.unlink(missing_ok=True)

    def manifest(self, topic: str) -> dict[str, Any]:
        """What was last written by :meth:`write_manifest`; empty where nothing readable is."""
        try:
            manifest = json.loads((self._folder(topic) / "manifest.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return manifest if isinstance(manifest, dict) else {}

    def write_manifest(self, topic: str, manifest: dict[str, Any]) -> None:
        """Replace the manifest; it appears whole or not at all."""
        path = self._folder(topic) / "manifest.json"
        partial = path.with_name(f".manifest.{os.getpid()}.partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(finite(manifest), file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def versions(self, topic: str) -> list[int]:
        """Of which there are files, ascending."""
        stems = [path.stem for path in self._folder(topic).glob("*.safetensors")]
        return sorted(int(stem) for stem in stems if stem.isdigit())

    def write(self, topic: str, version: int, flat: FlatWeights) -> None:
        """Write a version's weights; they appear whole or not at all."""
        save_safetensors(flat, self._path(topic, version))

    def read(self, topic: str, version: int) -> FlatWeights | None:
        """A version's weights; None where they cannot be read."""
        try:
            return load_safetensors(self._path(topic, version))
        except Exception:
            logger.warning("weights %s %d cannot be read", topic, version, exc_info=True)
            return None

    def remove(self, topic: str, versions: Iterable[int]) -> None:
        """Remove files; those that are not there are fine."""
        for version in versions:
            self._path(topic, version).unlink(missing_ok=True)

    def prune(self, topic: str, keep: int, needed: Container[int] = ()) -> None:
        """Remove all but the newest ``keep`` versions and those that are needed."""
        old = self.versions(topic)[: -max(keep, 1)]
        self.remove(topic, (version for version in old if version not in needed))

    def append_history(self, topic: str, decision: dict[str, Any]) -> None:
        """Add a decision on a topic."""
        append_decision(self._roots[topic] / HISTORY_NAME, decision)

    def read_history(self, limit: int) -> list[dict[str, Any]]:
        """The last ``limit`` decisions on all topics, oldest first."""
        roots = dict.fromkeys(self._roots.values())
        found = [d for root in roots for d in read_decisions(root / HISTORY_NAME, limit)]
        return sorted(found, key=decision_time)[-limit:]

    def _folder(self, topic: str) -> Path:
        return self._roots[topic] / topic

    def _path(self, topic: str, version: int) -> Path:
        return self._folder(topic) / f"{version}.safetensors"


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
