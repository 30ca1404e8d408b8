"""Weight versions on disk: what a restarted registry comes back with.

    <directory>/<fingerprint>/<topic>/<version>.safetensors
    <directory>/<fingerprint>/<topic>/manifest.json
    <directory>/<fingerprint>/history.jsonl
    <directory>/.lock

A topic's fingerprint names the target and its initial draft: versions that were made for other
models stay where they are and are not loaded. Topics that start from one draft share a folder.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.actors.weights.flat import FlatWeights, load_safetensors, save_safetensors
from paceline.actors.weights.history import (
    HISTORY_NAME,
    append_decision,
    decision_time,
    finite,
    read_decisions,
)

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
