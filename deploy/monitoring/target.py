"""The target's deployment class: exports metrics, takes new settings from Serve while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from ray.serve import metrics

from paceline.actors.engine.target import TargetReplica
from paceline.deploy.config.live import Live, LiveTarget
from paceline.deploy.monitoring.exporter import Exporter, RaySink, Sample
from paceline.deploy.monitoring.readings import pool_samples, target_samples


class MeteredTarget(TargetReplica):
    """A target replica that exports metrics and can be reconfigured."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._live = Live(LiveTarget, self._retune)
        self._exporter = Exporter(self._samples, RaySink(metrics)).start()

    def _samples(self) -> Iterable[Sample]:
        return chain(target_samples(self.stats()), pool_samples(self.experts()))

    async def reconfigure(self, user_config: Any) -> None:
        """Apply new settings while requests run; called by Serve. See LiveTarget."""
        self._live.take(user_config)

    def _retune(self, asked: LiveTarget) -> None:
        self.set_limits(asked.max_speculative_tokens, asked.probe_share, asked.sample_share)

    async def describe(self, attempt: int = 0) -> dict[str, Any]:
        """See TargetReplica; ``live`` has the settings that were changed since the start."""
        return await super().describe(attempt) | {"live": self._live.describe()}
