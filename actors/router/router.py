"""The router's actor class: classifies one text at a time, in a thread if that is slow."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from paceline.actors.router.added_topic_head import AddedTopicHead
from paceline.actors.router.classifier import TopicClassifier
from paceline.actors.router.regression import ClassifiedTexts
from paceline.actors.router.topic_fit import TopicFit, TopicFitSettings, fit_topic
from paceline.actors.weights.subscriber import RegistryHandle, RegistrySubscriber
from paceline.actors.weights.topics import RouterHead, TopicsView

logger = logging.getLogger(__name__)

# A thread must take the interpreter from a busy event loop after every operation: under load that
# multiplies the time of a fast classification, and answers wait for it.
_MAX_FAST_S = 0.004
_TOO_SLOW_S = 0.25  # one call of so long ends classification on the event loop
_TRIALS = 5
_LONG_TEXT = "What is a loop? " * 4096  # longer than is read


@dataclass(frozen=True, slots=True)
class RouterFit:
    """A fitted head with a new topic, as it is sent between processes.

    Attributes:
        fit: the figures.
        rejection: why the head must not be used, None if it may.
        head: with the new topic.
    """

    fit: TopicFit
    rejection: str | None
    head: RouterHead


class TopicRouter:
    """Classifies prompts by topic; a plain class, deployed by ``deploy/app.py``.

    Added topics come from the registry, which may be dead or slow at any time: known topics are
    still classified then.
    """

    def __init__(
        self,
        model_path: str,
        encoder_path: str | None = None,
        num_threads: int = 1,
        registry: RegistryHandle | None = None,
    ) -> None:
        """Load the classifier.

        Args:
            model_path: see TopicClassifier.
            encoder_path: likewise.
            num_threads: torch's, in this process.
            registry: actor handle of the weight registry; None: no topic is ever added.

        Raises:
            FileNotFoundError: a folder holds no model.
            ValueError: the head was fitted on another encoder.
        """
        torch.set_num_threads(num_threads)
        self._classifier = TopicClassifier(model_path, encoder_path)
        # One thread: forwards of a millisecond gain nothing from concurrency, and callers that
        # time out leave no threads behind.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="router")
        seconds = min(self._timed(_LONG_TEXT)[1] for _ in range(_TRIALS))
        self._on_loop = seconds <= _MAX_FAST_S
        place = "the event loop" if self._on_loop else "a thread"
        logger.info("router: %.1f ms for a long text, on %s", 1e3 * seconds, place)
        self._lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        if registry is not None:
            RegistrySubscriber(registry, on_topics=self._update_topics).start()

    async def classify(self, text: str) -> dict[str, float]:
        """Probability by topic, ``general`` included; they sum to 1."""
        loop = asyncio.get_running_loop()
        if not self._on_loop:
            return await loop.run_in_executor(self._worker, self._classifier.classify, text)
        async with self._lock_of(loop):
            await asyncio.sleep(0)  # let other tasks run between two texts
            probabilities, seconds = self._timed(text)
        if seconds > _TOO_SLOW_S:
            logger.warning("router: %.0f ms for a text, on a thread from now on", 1e3 * seconds)
            self._on_loop = False
        return probabilities

    def _timed(self, text: str) -> tuple[dict[str, float], float]:
        began = time.perf_counter()
        return self._classifier.classify(text), time.perf_counter() - began

    def _lock_of(self, loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
        if self._lock is None or self._lock[0] is not loop:
            self._lock = loop, asyncio.Lock()
        return self._lock[1]

    async def labels(self) -> tuple[str, ...]:
        """All topics that are classified now."""
        return self._classifier.labels

    async def fit_topic(
        self,
        topic: str,
        examples: Sequence[str],
        others: Sequence[str],
        experts: Collection[str],
        head: RouterHead | None = None,
        settings: TopicFitSettings | None = None,
    ) -> RouterFit:
        """Fit a head with a further topic; it is used once the registry announces it.

        Features are computed in a thread, text by text, between classifications.

        Args:
            topic: name.
            examples: prompts of it.
            others: prompts whose topic should not change.
            experts: present topics.
            head: the present one, if any.
            settings: see TopicFitSettings.

        Raises:
            ValueError: too few prompts.
        """
        own = self._classifier
        present = AddedTopicHead.empty(own.fingerprint, own.feature_size)
        if head is not None and head.facts.get("base") == own.fingerprint:
            # without rows of a topic of that name that was removed by hand
            present = AddedTopicHead.restore(head.facts, head.arrays).without(topic)
        mine = await self._features(examples)
        rest = torch.cat([await self._features(others), torch.from_numpy(present.features.copy())])
        labels, texts = await asyncio.to_thread(
            own.classify_features, torch.cat([mine, rest]), present
        )
        end = len(mine)
        new = ClassifiedTexts(texts.features[:end], texts.logits[:end])
        old = ClassifiedTexts(texts.features[end:], texts.logits[end:])
        settings = settings or TopicFitSettings()
        known = {*experts, *present.topics}
        fit = await asyncio.to_thread(fit_topic, topic, new, old, labels, known, settings)
        weight = fit.row.weight.astype(np.float32)
        grown = present.with_row(topic, weight, fit.row.bias, mine.numpy())
        return RouterFit(fit, fit.rejection(settings), RouterHead(*grown.export()))

    async def check_health(self) -> None:
        """Check that the classifier gives finite probabilities.

        Raises:
            RuntimeError: its weights are broken.
        """
        probabilities = await self.classify("How many apples are left?")
        if not abs(sum(probabilities.values()) - 1) < 1e-6:
            raise RuntimeError(f"router: probabilities are broken: {probabilities}")

    async def _features(self, texts: Sequence[str]) -> torch.Tensor:
        """Features of the texts that are not empty, float32 ``[N, F]``."""
        loop, found = asyncio.get_running_loop(), []
        for text in texts:
            features = await loop.run_in_executor(self._worker, self._classifier.features, text)
            if features is not None:
                found.append(features)
        return torch.stack(found) if found else torch.zeros(0, self._classifier.feature_size)

    def _update_topics(self, view: TopicsView) -> None:
        if view.head is None:
            return
        try:
            head = AddedTopicHead.restore(view.head.facts, view.head.arrays)
            self._classifier.set_head(head)
        except ValueError as error:  # of another router's model
            logger.warning("added topics are not classified: %s", error)
