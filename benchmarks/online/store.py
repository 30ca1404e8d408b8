"""Units of work, one JSON each: what is there is not computed again."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class Store:
    """A folder of results, each keyed by its name and by all settings that decided it."""

    def __init__(self, folder: Path, published: Path | None = None) -> None:
        """Make the folders where they are missing.

        Args:
            folder: of this machine's results.
            published: of results that went before, compressed, which count as this machine's;
                every new one is added. They outlive the machine, in a repository for one.
        """
        self.folder = folder
        self._published = published
        for each in (folder, published):
            if each is not None:
                each.mkdir(parents=True, exist_ok=True)

    def path(self, name: str, settings: Mapping[str, Any], suffix: str = ".json") -> Path:
        """Where a unit lies, or what belongs to it under another suffix."""
        return self.folder / f"{name}-{digest(settings)}{suffix}"

    def unit(
        self, name: str, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """A unit's result: the one on disk, else ``make()``'s, which is then kept.

        Args:
            name: what it is, for people; may hold no slash.
            settings: all that decides the result, as JSON holds it.
            make: computes the result.
        """
        found = self.find(name, settings)
        return self.put(name, settings, make()) if found is None else found

    def find(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result on disk; None where there is no whole one."""
        published = self._published_path(name, settings)
        for path in (self.path(name, settings), published):
            kept = None if path is None else _read(path)
            if kept is not None and kept.get("settings") == json.loads(json.dumps(settings)):
                if published is not None and _read(published) is None:
                    _publish(kept, published)
                return dict(kept["result"])
        return None

    def put(self, name: str, settings: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Keep a result; a killed writer leaves none rather than half of one.

        Returns:
            the result as it will be read again.
        """
        path = self.path(name, settings)
        partial = path.with_name(f".{path.name}.partial")
        kept = {"name": name, "settings": settings, "result": result}
        partial.write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
        if (published := self._published_path(name, settings)) is not None:
            _publish(kept, published)
        return dict(json.loads(path.read_text(encoding="utf-8"))["result"])

    def _published_path(self, name: str, settings: Mapping[str, Any]) -> Path | None:
        suffix = f"{name}-{digest(settings)}.json.gz"
        return None if self._published is None else self._published / suffix

    def every(self, prefix: str) -> Iterator[dict[str, Any]]:
        """All units whose name begins so: name, settings and result, in the names' order."""
        paths = {path.name: [path] for path in self.folder.glob(f"{prefix}*.json")}
        if self._published is not None:
            for path in self._published.glob(f"{prefix}*.json.gz"):
                paths.setdefault(path.name.removesuffix(".gz"), []).append(path)
        for name in sorted(paths):
            kept = next(filter(None, map(_read, paths[name])), None)
            if kept is not None:
                yield kept


def digest(settings: Mapping[str, Any]) -> str:
    """Short and the same wherever the settings are."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _publish(kept: Mapping[str, Any], path: Path) -> None:
    text = json.dumps(kept, separators=(",", ":"), allow_nan=False)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(gzip.compress(text.encode(), mtime=0))
    partial.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = path.read_bytes()
        kept = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, zlib.error, ValueError):
        return None
    whole = isinstance(kept, dict) and {"name", "settings", "result"} <= kept.keys()
    return kept if whole else None
