"""The shard and the board with an exporter beside them; see `metered` for the rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray.util import metrics

from paceline.actors.replay.shard import ReplayShard
from paceline.cluster.scheduler.board import LoadBoard
from paceline.deploy.monitoring.exporter import Exporter, Sample
from paceline.deploy.monitoring.readings import board_samples, shard_samples
from paceline.deploy.monitoring.sink import RaySink


class MeteredShard(ReplayShard):
    """A replay shard whose figures are exported."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See ReplayShard."""
        super().__init__(*args, **options)
        self._exporter = Exporter(lambda: shard_samples(self.stats()), RaySink(metrics)).start()


class MeteredBoard(LoadBoard):
    """A load board whose figures are exported."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See LoadBoard."""
        super().__init__(*args, **options)
        self._exporter = Exporter(self._samples, RaySink(metrics)).start()

    def _samples(self) -> Iterable[Sample]:
        return board_samples(self.snapshot(), self.yields())
