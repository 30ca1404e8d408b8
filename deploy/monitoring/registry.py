"""The weight registry with an exporter beside it."""

from __future__ import annotations

from typing import Any

from ray.util import metrics

from paceline.actors.weights.registry import WeightRegistry
from paceline.deploy.monitoring.exporter import Exporter
from paceline.deploy.monitoring.readings import registry_samples
from paceline.deploy.monitoring.sink import RaySink


class MeteredRegistry(WeightRegistry):
    """A weight registry whose figures are exported."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See WeightRegistry."""
        super().__init__(*args, **options)
        sink = RaySink(metrics)
        self._exporter = Exporter(lambda: registry_samples(self.figures()), sink).start()
