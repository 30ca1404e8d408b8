"""Topics that were added to a running system, as configuration and front door know them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from paceline.actors.weights.subscriber import RegistrySubscriber
from paceline.actors.weights.topics import TopicsView, read_catalogue
from paceline.deploy.config.config import WEIGHTS_FOLDER, PacelineConfig


def with_added(config: PacelineConfig) -> PacelineConfig:
    """The configuration with the topics that were added to the system of its state folder.

    Their experts start from ``general``'s folder, as they did when they were added.
    """
    added = read_catalogue(config.state_path / WEIGHTS_FOLDER).topics
    return with_topics(config, [topic.name for topic in added])


def with_topics(config: PacelineConfig, names: Sequence[str]) -> PacelineConfig:
    """The configuration with further topics; those that it names already are fine."""
    new = tuple(name for name in names if name not in config.drafts.experts)
    if not new:
        return config
    drafts = config.drafts.model_copy(update={"topics": (*config.drafts.topics, *new)})
    return config.model_copy(update={"drafts": drafts})


class TopicList(Collection[str]):
    """The experts that a front door knows: those it began with, and those added since.

    It subscribes to the registry in the background: no request waits for it.
    """

    def __init__(self, experts: Sequence[str], registry: Any) -> None:
        """Subscribe.

        Args:
            experts: that there are from the start, ``general`` first.
            registry: actor handle of the weight registry; None: none is ever added.
        """
        self._experts = tuple(experts)
        self._lock = threading.Lock()
        self.view = TopicsView(etag="")
        if registry is not None:
            RegistrySubscriber(registry, on_topics=self.take).start()

    def __contains__(self, name: object) -> bool:
        return name in self._experts

    def __iter__(self) -> Iterator[str]:
        return iter(self._experts)

    def __len__(self) -> int:
        return len(self._experts)

    @property
    def shards(self) -> dict[str, Any]:
        """Handles of the added topics' replay shards, as far as they are known."""
        return {name: parts.shard for name, parts in self.view.parts.items()}

    def take(self, view: TopicsView) -> None:
        """Add a view's topics; known ones stay."""
        with self._lock:
            new = [topic.name for topic in view.topics if topic.name not in self._experts]
            self._experts = (*self._experts, *new)
            self.view = view
