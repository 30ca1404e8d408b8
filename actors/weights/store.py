"""Weight versions on disk: what a restarted registry comes back with.

    <directory>/<fingerprint>/<topic>/<version>.safetensors
    <directory>/<fingerprint>/<topic>/manifest.json
    <directory>/<fingerprint>/history.jsonl

The fingerprint names the target and the initial drafts: versions that were made for other
models stay where they are and are not loaded.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.actors.weights.flat import FlatWeights, load_safetensors, save_safetensors

logger = logging.getLogger(__name__)


class WeightStore:
    """Files of one fingerprint; one process writes them."""

    def __init__(self, directory: str | Path, fingerprint: str, topics: Sequence[str]) -> None:
        """Make the folders and remove what a killed writer left half-written."""
        self._root = Path(directory) / fingerprint
        for topic in topics:
            folder = self._root / topic
            folder.mkdir(parents=True, exist_ok=True)
            for partial in folder.glob(".*.partial"):
                partial.unlink(missing_ok=True)

    def version(self, topic: str) -> int:
        """The highest version ever written, 0 where there is none."""
        found = [self._manifest(topic).get("version", 0), *self._versions(topic)]
        return max(int(version) for version in found)

    def write(self, topic: str, version: int, flat: FlatWeights, manifest: dict[str, Any]) -> None:
        """Write weights, then the manifest that names them; both appear whole or not at all."""
        save_safetensors(flat, self._path(topic, version))
        path = self._root / topic / "manifest.json"
        partial = path.with_name(f".manifest.{os.getpid()}.partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(manifest | {"version": version}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def read_newest(self, topic: str) -> tuple[int, FlatWeights] | None:
        """The newest readable version with its number; None where there is none."""
        for version in sorted(self._versions(topic), reverse=True):
            try:
                return version, load_safetensors(self._path(topic, version))
            except Exception:
                logger.warning("weights %s %d cannot be read", topic, version, exc_info=True)
        return None

    def prune(self, topic: str, keep: int) -> None:
        """Remove all but the newest ``keep`` versions."""
        for version in sorted(self._versions(topic), reverse=True)[max(keep, 1) :]:
            self._path(topic, version).unlink(missing_ok=True)

    def append_history(self, decision: dict[str, Any]) -> None:
        """Add a line; a line that a kill cut short does not spoil the next one."""
        path = self._root / "history.jsonl"
        with path.open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(decision).encode() + b"\n")

    def read_history(self, limit: int) -> list[dict[str, Any]]:
        """The last ``limit`` decisions, oldest first; broken lines are left out."""
        path = self._root / "history.jsonl"
        if not path.exists():
            return []
        decisions = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-limit:]:
            try:
                decision = json.loads(line)
            except ValueError:
                continue
            if isinstance(decision, dict):
                decisions.append(decision)
        return decisions

    def _path(self, topic: str, version: int) -> Path:
        return self._root / topic / f"{version}.safetensors"

    def _versions(self, topic: str) -> list[int]:
        stems = [path.stem for path in (self._root / topic).glob("*.safetensors")]
        return [int(stem) for stem in stems if stem.isdigit()]

    def _manifest(self, topic: str) -> dict[str, Any]:
        try:
            manifest = json.loads((self._root / topic / "manifest.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return manifest if isinstance(manifest, dict) else {}
