"""The router's actor class: one text at a time, off the event loop where it takes long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.actors.router.classifier import TopicClassifier
from paceline.actors.router.grown_head import GrownHead
from paceline.actors.router.growth import Growth, GrowthSettings, grow
from paceline.actors.router.regression import Texts
from paceline.actors.weights.subscriber import RegistrySubscriber
from paceline.actors.weights.topics import TopicsView

logger = logging.getLogger(__name__)

# A thread has to take the interpreter from a busy event loop after every operation: under load that
# makes a brief classification several times as long, and answers wait for the topic.
_BRIEF_S = 0.004
_TOO_LONG_S = 0.25  # of the loop's time, once: no more of these there
_TRIALS = 5
_LONG_TEXT = "What is a loop? " * 4096  # more than is read


@dataclass(frozen=True, slots=True)
class GrownRouter:
    """What :meth:`TopicRouter.grow` has made: plain data that crosses process borders.

    Attributes:
        growth: the figures.
        fault: why the head must not be used, None where it may.
        facts: of the head with the new topic, see GrownHead.parts.
        arrays: likewise.
    """

    growth: Growth
    fault: str | None
    facts: dict[str, Any]
    arrays: dict[str, Any]


class TopicRouter:
    """Tells prompts' topics to the front door; a plain class, deployed by ``deploy/app.py``.

    Topics that were added come from the registry, which may be dead or slow at any time: the
    router then tells those apart that it knows.
    """

    def __init__(self, model_path: str, num_threads: int = 1, registry: Any = None) -> None:
        """Load the classifier; `num_threads` is torch's in this process.

        Args:
            model_path: the classifier's folder.
            num_threads: see above.
            registry: actor handle of the weight registry; None never grows.

        Raises:
            FileNotFoundError: the folder holds no model.
        """
        torch.set_num_threads(num_threads)
        self._classifier = TopicClassifier(model_path)
        # One thread: forwards of a millisecond gain nothing from running side by side, and a
        # caller that gives up waiting leaves no pile of threads behind.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="router")
        seconds = min(self._timed(_LONG_TEXT)[1] for _ in range(_TRIALS))
        self._brief = seconds <= _BRIEF_S
        where = "the event loop" if self._brief else "a thread"
        logger.info("router: %.1f ms for a long text, on %s", 1e3 * seconds, where)
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        if registry is not None:
            RegistrySubscriber(registry, on_topics=self._take_topics).start()

    async def classify(self, text: str) -> dict[str, float]:
        """Probability by topic, ``general`` included; they sum to 1."""
        loop = asyncio.get_running_loop()
        if not self._brief:
            return await loop.run_in_executor(self._worker, self._classifier.classify, text)
        async with self._turn_in(loop):
            await asyncio.sleep(0)  # between any two texts all others have their turn
            probabilities, seconds = self._timed(text)
        if seconds > _TOO_LONG_S:
            logger.warning("router: %.0f ms for a text, on a thread from now on", 1e3 * seconds)
            self._brief = False
        return probabilities

    def _timed(self, text: str) -> tuple[dict[str, float], float]:
        began = time.perf_counter()
        return self._classifier.classify(text), time.perf_counter() - began

    def _turn_in(self, loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
        """One text at a time; a lock belongs to the loop in which somebody waited for it."""
        if self._turn is None or self._turn[0] is not loop:
            self._turn = loop, asyncio.Lock()
        return self._turn[1]

    async def labels(self) -> tuple[str, ...]:
        """The topics that are told apart here and now."""
        return self._classifier.labels

    async def grow(
        self,
        topic: str,
        examples: Sequence[str],
        others: Sequence[str],
        experts: Collection[str],
        head: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
        settings: GrowthSettings | None = None,
    ) -> GrownRouter:
        """Learn to tell a further topic; nothing changes here until the registry announces it.

        Prompts are read one by one on a thread, beside or between those that are classified.

        Args:
            topic: its name.
            examples: prompts of it.
            others: prompts that shall stay where they are.
            experts: topics that are served now.
            head: facts and arrays of the present head, None where there is none.
            settings: see GrowthSettings.

        Raises:
            ValueError: too few prompts.
        """
        own = self._classifier
        present = GrownHead.empty(own.mark, own.feature_size)
        if head is not None and head[0].get("base") == own.mark:
            present = GrownHead.of(*head).without(topic)  # of one that was taken away by hand
        mine = await self._read(examples)
        rest = torch.cat([await self._read(others), torch.from_numpy(present.features.copy())])
        labels, judged = await asyncio.to_thread(own.judged, torch.cat([mine, rest]), present)
        end = len(mine)
        new = Texts(judged.features[:end], judged.logits[:end])
        old = Texts(judged.features[end:], judged.logits[end:])
        rules = settings or GrowthSettings()
        known = {*experts, *present.topics}
        growth = await asyncio.to_thread(grow, topic, new, old, labels, known, rules)
        weight = growth.row.weight.astype(np.float32)
        grown = present.with_row(topic, weight, growth.row.bias, mine.numpy())
        return GrownRouter(growth, growth.fault(rules), *grown.parts())

    async def check_health(self) -> None:
        """Raise when the classifier no longer answers with finite probabilities.

        Raises:
            RuntimeError: its weights are broken.
        """
        probabilities = await self.classify("How many apples are left?")
        if not abs(sum(probabilities.values()) - 1) < 1e-6:
            raise RuntimeError(f"router: probabilities are broken: {probabilities}")

    async def _read(self, texts: Sequence[str]) -> torch.Tensor:
        """Features of those that are not empty, float32 ``[N, F]``."""
        loop, found = asyncio.get_running_loop(), []
        for text in texts:
            features = await loop.run_in_executor(self._worker, self._classifier.features, text)
            if features is not None:
                found.append(features)
        return torch.stack(found) if found else torch.zeros(0, self._classifier.feature_size)

    def _take_topics(self, view: TopicsView) -> None:
        head = view.head
        if head is None:
            return
        try:
            self._classifier.take(GrownHead.of(head.facts, head.arrays))
        except ValueError as error:  # of another router: its topics are unknown here
            logger.warning("added topics are not told apart: %s", error)
