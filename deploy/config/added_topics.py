"""Topics that were added to a running system, as configuration and front door know them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from paceline.actors.weights.topics import TopicsView, read_catalogue
from paceline.deploy.config.config import WEIGHTS_FOLDER, PacelineConfig

logger = logging.getLogger(__name__)

_POLL_S = 10.0
_RETRY_S = 0.5


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

    It follows the registry in the background: no request waits for it or notices its death.
    """

    def __init__(self, experts: Sequence[str], registry: Any) -> None:
        """Ask nothing yet.

        Args:
            experts: that there are from the start, ``general`` first.
            registry: actor handle of the weight registry; None: none is ever added.
        """
        self._experts = tuple(experts)
        self._registry = registry
        self._following: asyncio.Task[None] | None = None
        self.view = TopicsView(etag="")

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

    def follow(self) -> None:
        """See that the registry is followed; call it in a running loop."""
        following = self._following
        if self._registry is not None and (following is None or following.done()):
            self._following = asyncio.create_task(self._follow())

    def take(self, view: TopicsView) -> None:
        """Know what a view shows; what was known stays."""
        new = [topic.name for topic in view.topics if topic.name not in self._experts]
        self._experts = (*self._experts, *new)
        self.view = view

    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout(3 * _POLL_S):
                    view = await self._registry.wait_topics.remote(self.view.etag, _POLL_S)
                if view is not None:
                    self.take(view)
            except Exception as error:
                logger.info("no topics from the registry (%r), trying again", error)
                await asyncio.sleep(_RETRY_S)
