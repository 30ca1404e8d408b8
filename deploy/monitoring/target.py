"""The target replica with an exporter beside it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from ray.serve import metrics

from paceline.actors.decoding.target import TargetReplica
from paceline.deploy.monitoring.exporter import Exporter, Sample
from paceline.deploy.monitoring.readings import pool_samples, target_samples
from paceline.deploy.monitoring.sink import RaySink


class MeteredTarget(TargetReplica):
    """A target replica whose figures are exported."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See TargetReplica."""
        super().__init__(*args, **options)
        self._exporter = Exporter(self._samples, RaySink(metrics)).start()

    def _samples(self) -> Iterable[Sample]:
        return chain(target_samples(self.figures()), pool_samples(self.experts()))
