"""The router's actor class: classification off the event loop, one text at a time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch

from paceline.actors.routing.classifier import TopicClassifier


class TopicRouter:
    """Tells prompts' topics to the front door; a plain class, deployed by ``deploy/app.py``."""

    def __init__(self, model_path: str, num_threads: int = 1) -> None:
        """Load the classifier; `num_threads` is torch's in this process.

        Raises:
            FileNotFoundError: the folder holds no model.
        """
        torch.set_num_threads(num_threads)
        self._classifier = TopicClassifier(model_path)
        # One thread: forwards of a millisecond gain nothing from running side by side, and a
        # caller that gives up waiting leaves no pile of threads behind.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="router")
        self._classifier.classify("warm up")

    async def classify(self, text: str) -> dict[str, float]:
        """Probability by topic, ``general`` included; they sum to 1."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._classifier.classify, text)

    def check_health(self) -> None:
        """Raise when the classifier no longer answers with finite probabilities.

        Raises:
            RuntimeError: its weights are broken.
        """
        probabilities = self._classifier.classify("How many apples are left?")
        if not abs(sum(probabilities.values()) - 1) < 1e-6:
            raise RuntimeError(f"router: probabilities are broken: {probabilities}")
