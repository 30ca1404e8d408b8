"""Added topics: their catalogue on disk, and what subscribers are sent of them."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

logger = logging.getLogger(__name__)

CATALOGUE_NAME = "topics.json"
_HEAD = "router-{revision}.safetensors"
TOPIC_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class AddedTopic:
    """A topic that no configuration names.

    Attributes:
        name: of the topic and its expert.
        like: the expert that it started as a copy of; its initial draft is that one's.
        added: unix seconds.
    """

    name: str
    like: str
    added: float = 0.0


@dataclass(frozen=True, slots=True)
class RouterHead:
    """What the router has learnt beside its model; what is in it is the router's own affair.

    Attributes:
        facts: JSON-able.
        arrays: by name.
    """

    facts: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TopicParts:
    """What an added topic works with.

    Attributes:
        shard: actor handle of what keeps its records.
        expert: in a pool, names of its draft's Serve deployment and of that one's application.
    """

    shard: Any
    expert: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class TopicsView:
    """The added topics as the registry announces them.

    Attributes:
        etag: another one wherever anything differs.
        revision: additions so far, also those of earlier lives.
        topics: in the order in which they came.
        head: of the router, None where it did not grow.
        parts: by topic, as far as somebody has brought them.
    """

    etag: str
    revision: int = 0
    topics: tuple[AddedTopic, ...] = ()
    head: RouterHead | None = None
    parts: Mapping[str, TopicParts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The content of ``topics.json`` and its head."""

    revision: int = 0
    topics: tuple[AddedTopic, ...] = ()
    head: RouterHead | None = None

    def with_topic(self, topic: AddedTopic, head: RouterHead | None) -> Catalogue:
        """The catalogue after an addition; None leaves the head as it is."""
        return replace(
            self,
            revision=self.revision + 1,
            topics=(*self.topics, topic),
            head=self.head if head is None else head,
        )


def read_catalogue(directory: str | Path) -> Catalogue:
    """What lies in a folder; empty where nothing readable does.

    A head that cannot be read is left out: the router then does without the added topics.
    """
    folder = Path(directory)
    content = _read_json(folder / CATALOGUE_NAME)
    try:
        topics = tuple(
            AddedTopic(str(topic["name"]), str(topic["like"]), float(topic["added"]))
            for topic in content.get("topics", ())
            if TOPIC_NAME.fullmatch(str(topic["name"]))
        )
        revision = int(content.get("revision", 0))
    except (TypeError, KeyError, ValueError):
        logger.warning("%s names no topics that can be read", folder / CATALOGUE_NAME)
        return Catalogue()
    return Catalogue(revision, topics, _read_head(folder, content.get("router")))


def write_catalogue(directory: str | Path, catalogue: Catalogue) -> None:
    """Write the head, then replace ``topics.json``: it appears whole or not at all.

    Raises:
        OSError: nothing has changed then.
    """
    folder = Path(directory)
    content: dict[str, Any] = {
        "revision": catalogue.revision,
        "topics": [{"name": t.name, "like": t.like, "added": t.added} for t in catalogue.topics],
    }
    head = catalogue.head
    if head is not None:
        name = _HEAD.format(revision=catalogue.revision)
        _replace(folder / name, lambda partial: save_file(_contiguous(head), partial))
        content["router"] = {"file": name, "facts": head.facts}
    text = json.dumps(content, allow_nan=False, indent=1)
    _replace(folder / CATALOGUE_NAME, lambda partial: partial.write_text(text, encoding="utf-8"))
    for old in folder.glob(_HEAD.format(revision="*")):
        if head is not None and old.name != content["router"]["file"]:
            old.unlink(missing_ok=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        # set aside: the next addition would write over what somebody may be able to mend
        logger.warning("%s cannot be read", path, exc_info=True)
        with suppress(OSError):
            path.replace(path.with_suffix(".unreadable"))
        return {}
    return content if isinstance(content, dict) else {}


def _read_head(folder: Path, entry: Any) -> RouterHead | None:
    if not isinstance(entry, dict):
        return None
    try:
        name = Path(str(entry["file"])).name
        return RouterHead(dict(entry["facts"]), load_file(folder / name))
    except Exception:
        logger.warning("the router's head cannot be read", exc_info=True)
        return None


def _contiguous(head: RouterHead) -> dict[str, NDArray[Any]]:
    return {name: np.ascontiguousarray(array) for name, array in head.arrays.items()}


def _replace(path: Path, write: Any) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class TopicExists(ValueError):  # noqa: N818 - a state of affairs, named as callers say it
    """There is such a topic already."""


class OutOfDate(ValueError):  # noqa: N818 - a state of affairs, named as callers say it
    """Another topic was added meanwhile: the router's new head does not know it."""


class AddedTopics:
    """The catalogue on disk and who keeps what of it; disk first, announcement second."""

    def __init__(self, directory: str | Path) -> None:
        """Read what lies there.

        Args:
            directory: of all versions; this process's alone.
        """
        self._directory = directory
        self._catalogue = read_catalogue(directory)
        self._parts: dict[str, TopicParts] = {}

    @property
    def topics(self) -> tuple[AddedTopic, ...]:
        """All that were added, oldest first."""
        return self._catalogue.topics

    def inherited(self, given: Mapping[str, str]) -> dict[str, str]:
        """What experts have, by name, and with it what added ones have of those they began as."""
        found = dict(given)
        for new in self._catalogue.topics:
            if new.name not in found and new.like in found:
                found[new.name] = found[new.like]
        return found

    def check(self, name: str, known: Container[str], revision: int | None) -> None:
        """Refuse an addition.

        Args:
            name: of the new topic.
            known: every topic that there is.
            revision: that the new head was grown from; None where there is no new head.

        Raises:
            TopicExists: there is one of that name.
            OutOfDate: the revision is another one by now.
            ValueError: that is no name.
        """
        if not TOPIC_NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be the name of a topic")
        if name in known:
            raise TopicExists(f"there is a topic {name} already")
        if revision is not None and revision != self._catalogue.revision:
            raise OutOfDate("another topic was added meanwhile")

    def add(self, topic: AddedTopic, head: RouterHead | None) -> None:
        """Write the catalogue with a further topic: from then on it is there.

        Raises:
            OSError: it is not there then.
        """
        catalogue = self._catalogue.with_topic(topic, head)
        write_catalogue(self._directory, catalogue)
        self._catalogue = catalogue

    def bring(self, name: str, parts: TopicParts) -> bool:
        """Take the handles of an added topic's parts; whether they were not known yet."""
        new = name not in self._parts
        self._parts = {**self._parts, name: parts}
        return new

    def view(self) -> TopicsView:
        """What is announced."""
        own = self._catalogue
        etag = f"{own.revision} {' '.join(sorted(self._parts))}"
        return TopicsView(etag, own.revision, own.topics, own.head, dict(self._parts))
