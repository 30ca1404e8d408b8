"""The target's deployment class: exports metrics, takes new settings from Serve while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import Any

from ray.serve import metrics

from paceline.actors.engine.target import TargetReplica
from paceline.deploy.config.user_config import (
    MeteredTargetStatus,
    TargetUserConfig,
    UserConfigState,
)
from paceline.deploy.monitoring.exporter import Exporter, RaySink, Sample
from paceline.deploy.monitoring.samples import pool_samples, target_samples
from paceline.deploy.monitoring.vllm import ReplicaMetrics, replica_metrics


class MeteredTarget(TargetReplica):
    """A target replica that exports metrics and can be reconfigured."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._user_config = UserConfigState(TargetUserConfig, self._apply_user_config)
        self._exporter = Exporter(self._samples, RaySink(metrics)).start()

    def _samples(self) -> Iterable[Sample]:
        return chain(target_samples(self.stats()), pool_samples(self.experts()))

    def metrics(self) -> ReplicaMetrics:
        """Return what the API's ``/metrics`` shows of this replica."""
        return replica_metrics(self._replica_id, self.stats())

    async def reconfigure(self, user_config: Any) -> None:
        """Apply new settings while requests run; called by Serve. See TargetUserConfig."""
        self._user_config.update(user_config)

    def _apply_user_config(self, user_config: TargetUserConfig) -> None:
        self.set_limits(
            user_config.max_speculative_tokens, user_config.probe_share, user_config.sample_share
        )

    async def status(self, attempt: int = 0) -> MeteredTargetStatus:
        """See TargetReplica; with the settings that were changed since the start."""
        status = asdict(await super().status(attempt))
        return MeteredTargetStatus(**status, user_config=self._user_config.status())
