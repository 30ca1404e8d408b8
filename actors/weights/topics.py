"""Added topics: their catalogue on disk, and what subscribers are sent of them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from paceline.actors.atomic_file import replace_file, replace_text

logger = logging.getLogger(__name__)

CATALOGUE_NAME = "topics.json"
_HEAD = "router-{revision}.safetensors"
TOPIC_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class AddedTopic:
    """A topic added to a running system.

    Attributes:
        name: of the topic and its expert.
        like: the expert that it was copied from, whose initial draft is its own.
        added: unix seconds.
    """

    name: str
    like: str
    added: float = 0.0


@dataclass(frozen=True, slots=True)
class RouterHead:
    """Added rows of the router's classifier, opaque to the registry; see AddedTopicHead.

    Attributes:
        facts: JSON-able.
        arrays: by name.
    """

    facts: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TopicActors:
    """Handles of an added topic's actors.

    Attributes:
        shard: actor handle of the replay shard.
        expert: in a pool, names of the expert's Serve deployment and application.
    """

    shard: Any
    expert: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class TopicsView:
    """Snapshot of the added topics.

    Attributes:
        etag: changes with any other field.
        revision: number of additions ever.
        topics: in the order of their addition.
        head: of the router, None if it has none.
        actors: by topic, as far as they have been started.
    """

    etag: str
    revision: int = 0
    topics: tuple[AddedTopic, ...] = ()
    head: RouterHead | None = None
    actors: Mapping[str, TopicActors] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TopicCatalogue:
    """Content of ``topics.json``, with the router's head."""

    revision: int = 0
    topics: tuple[AddedTopic, ...] = ()
    head: RouterHead | None = None

    def with_topic(self, topic: AddedTopic, head: RouterHead | None) -> TopicCatalogue:
        """The catalogue with a further topic; a head of None keeps the present one."""
        return replace(
            self,
            revision=self.revision + 1,
            topics=(*self.topics, topic),
            head=self.head if head is None else head,
        )


def read_catalogue(directory: str | Path) -> TopicCatalogue:
    """Read a folder's catalogue; empty if there is none or it is unreadable.

    An unreadable head is left out: the router then does not know the added topics.
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
        logger.warning("%s holds no valid topics", folder / CATALOGUE_NAME)
        return TopicCatalogue()
    return TopicCatalogue(revision, topics, _read_head(folder, content.get("router")))


def write_catalogue(directory: str | Path, catalogue: TopicCatalogue) -> None:
    """Write the head, then replace ``topics.json`` atomically.

    Raises:
        OSError: of the disk; nothing has changed.
    """
    folder = Path(directory)
    content: dict[str, Any] = {
        "revision": catalogue.revision,
        "topics": [{"name": t.name, "like": t.like, "added": t.added} for t in catalogue.topics],
    }
    head = catalogue.head
    if head is not None:
        name = _HEAD.format(revision=catalogue.revision)
        replace_file(folder / name, lambda partial: save_file(_contiguous(head), partial))
        content["router"] = {"file": name, "facts": head.facts}
    text = json.dumps(content, allow_nan=False, indent=1)
    replace_text(folder / CATALOGUE_NAME, text)
    for old in folder.glob(_HEAD.format(revision="*")):
        if head is not None and old.name != content["router"]["file"]:
            old.unlink(missing_ok=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        # set aside for repair: the next addition would overwrite it
        logger.warning("%s cannot be read", path, exc_info=True)
        with suppress(OSError):
            path.replace(path.with_suffix(".unreadable"))
        return {}
    return content if isinstance(content, dict) else {}


def _read_head(folder: Path, entry: object) -> RouterHead | None:
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


class TopicExistsError(ValueError):
    """There is such a topic already."""


class StaleRevisionError(ValueError):
    """Another topic was added meanwhile: the router's new head lacks it."""


class AddedTopics:
    """The catalogue, on disk, and the handles of the topics' actors, in memory."""

    def __init__(self, directory: str | Path) -> None:
        """Read the catalogue of a folder that this process alone uses."""
        self._directory = directory
        self._catalogue = read_catalogue(directory)
        self._actors: dict[str, TopicActors] = {}

    @property
    def topics(self) -> tuple[AddedTopic, ...]:
        """All added topics, oldest first."""
        return self._catalogue.topics

    def inherited(self, given: Mapping[str, str]) -> dict[str, str]:
        """Values by expert, with those that added experts inherit from what they were copied of."""
        found = dict(given)
        for new in self._catalogue.topics:
            if new.name not in found and new.like in found:
                found[new.name] = found[new.like]
        return found

    def check(self, name: str, known: Container[str], revision: int | None) -> None:
        """Check that a topic can be added.

        Args:
            name: of the new topic.
            known: all topics.
            revision: of the catalogue that the new head extends; None without a new head.

        Raises:
            TopicExistsError: the name is taken.
            StaleRevisionError: the catalogue has another revision now.
            ValueError: an invalid name.
        """
        if not TOPIC_NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be the name of a topic")
        if name in known:
            raise TopicExistsError(f"there is a topic {name} already")
        if revision is not None and revision != self._catalogue.revision:
            raise StaleRevisionError("another topic was added meanwhile")

    def add(self, topic: AddedTopic, head: RouterHead | None) -> None:
        """Add a topic to the catalogue on disk.

        Raises:
            OSError: of the disk; nothing was added.
        """
        catalogue = self._catalogue.with_topic(topic, head)
        write_catalogue(self._directory, catalogue)
        self._catalogue = catalogue

    def register_actors(self, name: str, actors: TopicActors) -> bool:
        """Store the handles of an added topic's actors; whether there were none before."""
        new = name not in self._actors
        self._actors = {**self._actors, name: actors}
        return new

    def view(self) -> TopicsView:
        """Snapshot for subscribers."""
        own = self._catalogue
        etag = f"{own.revision} {' '.join(sorted(self._actors))}"
        return TopicsView(etag, own.revision, own.topics, own.head, dict(self._actors))
