"""Has the actors of added topics there: their replay shards and, in a pool, their experts.

No ``from __future__ import annotations`` here: Ray reads the annotations of what it wraps.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from paceline.actors.weights.subscriber import RegistrySubscriber
from paceline.actors.weights.topics import TopicParts, TopicsView
from paceline.deploy import learning
from paceline.deploy.config.added_topics import with_topics
from paceline.deploy.config.config import PacelineConfig

logger = logging.getLogger(__name__)

_TIMEOUT_S = 30.0

# Starts an expert of a pool beside those that there are; gives (deployment, application).
StartExpert = Callable[[PacelineConfig, str], tuple[str, str]]


def refusal(config: PacelineConfig) -> str | None:
    """Why no topic can be added while a system of this configuration runs; None where one can."""
    if config.drafts.placement == "pool" and config.drafts.num_gpus > 0:
        return (
            "The GPUs are shared out among the target and the experts of the pool when the server "
            "starts, and there is no part left for another one: name the topic in drafts.topics "
            "and start the server again."
        )
    return None


class TopicKeeper:
    """Follows the registry on a thread of the process that has started the other actors.

    Whoever starts an actor owns it: were it one that may be replaced, the shard would die with it.
    A registry that was killed comes back without the handles, and gets them again.
    """

    def __init__(
        self,
        config: PacelineConfig,
        registry: Any,
        shards: dict[str, Any],
        start_expert: StartExpert,
    ) -> None:
        """Begin.

        Args:
            config: that the other actors were started with.
            registry: actor handle of the weight registry.
            shards: topic to handle; added topics' are put in.
            start_expert: see StartExpert; not used where drafts are colocated.
        """
        self._config = config
        self._registry = registry
        self._shards = shards
        self._start_expert = start_expert
        self._own: dict[str, Any] = {}  # shards that were started here
        self._parts: dict[str, TopicParts] = {}
        self._stopped = threading.Event()
        self._making = threading.Lock()
        self._subscriber = RegistrySubscriber(registry, on_topics=self._keep)
        self._subscriber.start()

    def stop(self) -> None:
        """End what was started here; nothing is started afterwards, and nobody waits in Ray."""
        self._stopped.set()
        self._subscriber.stop(_TIMEOUT_S)
        with self._making:
            for shard in self._own.values():
                ray.kill(shard, no_restart=True)
            for parts in self._parts.values():
                if parts.expert is not None:
                    serve.delete(parts.expert[1])

    def _keep(self, view: TopicsView) -> None:
        """Start what is missing and announce it.

        Raises:
            RuntimeError: something is to be tried again.
        """
        missing = []
        config = with_topics(self._config, [topic.name for topic in view.topics])
        for name in config.drafts.topics:
            if name in self._config.drafts.topics or name in view.parts:
                continue
            try:
                parts = self._parts.get(name) or self._make(config, name)
                told = self._registry.bring_parts.remote(name, parts)
                self._subscriber.get(told, _TIMEOUT_S)
            except Exception:
                if not self._stopped.is_set():
                    logger.warning("%s: its parts are not all there yet", name, exc_info=True)
                missing.append(name)
        if missing:
            raise RuntimeError(f"no parts of {', '.join(missing)} yet")

    def _make(self, config: PacelineConfig, name: str) -> TopicParts:
        with self._making:
            if self._stopped.is_set():
                raise RuntimeError("the server ends")
            if name not in self._own:
                self._own[name] = self._shards[name] = learning.start_shard(config, name)
            expert = None
            if config.drafts.placement == "pool":
                expert = self._start_expert(config, name)
            self._parts[name] = TopicParts(self._own[name], expert)
            return self._parts[name]
