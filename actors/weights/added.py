"""The registry's part about added topics: what there is, what is refused, what is announced."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

from paceline.actors.weights.announcements import Announcements
from paceline.actors.weights.catalogue import (
    TOPIC_NAME,
    AddedTopic,
    RouterHead,
    TopicParts,
    TopicsView,
    read_catalogue,
    write_catalogue,
)


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


class TopicDesk:
    """The registry's face to those who follow the added topics."""

    def __init__(self, directory: str | Path) -> None:
        """Read what lies there.

        Args:
            directory: of all versions; this process's alone.
        """
        self._added = AddedTopics(directory)
        self._announcements = Announcements()

    def bring_parts(self, topic: str, parts: TopicParts) -> None:
        """Take the handles of what works for an added topic, and hand them to all who ask."""
        if self._added.bring(topic, parts):
            self._announcements.wake()

    def topics(self) -> TopicsView:
        """The added topics, the router's head, and the handles of what works for them."""
        return self._added.view()

    async def wait_topics(self, etag: str, timeout_s: float) -> TopicsView | None:
        """Wait for another view than that of an ``etag``; None after ``timeout_s`` seconds."""

        def look() -> dict[str, TopicsView]:
            view = self._added.view()
            return {} if view.etag == etag else {"view": view}

        return (await self._announcements.wait(look, timeout_s)).get("view")
