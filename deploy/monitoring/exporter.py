"""Turns snapshots of plain numbers into metrics, about once a second, beside the work.

Nothing waits for it and nothing notices where it fails: it reads what others count, in a thread
of its own, and every error ends with the sample that it struck.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from paceline.deploy.monitoring.catalogue import BY_NAME, Kind, Metric

logger = logging.getLogger(__name__)

EVERY_S = 1.0
_WARN_EVERY = 600  # turns of failures between two lines in the log


class Sample(NamedTuple):
    """A number as it stands now.

    Attributes:
        name: of a metric of the catalogue.
        value: a counter's total since its part's start, a gauge's value, or one observation of a
            histogram.
        labels: values of the metric's labels, in their order.
    """

    name: str
    value: float
    labels: tuple[str, ...] = ()


class Sink(Protocol):
    """Where metrics go."""

    def record(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Increase a counter, by 0 to begin it, set a gauge, or observe; it may raise."""


class Exporter:
    """Reads samples and hands on what is new in them."""

    def __init__(
        self, read: Callable[[], Iterable[Sample]], sink: Sink, every_s: float = EVERY_S
    ) -> None:
        """Begin with nothing exported, see :meth:`start`.

        Args:
            read: the samples now; called on the exporter's thread, and may raise.
            sink: takes them.
            every_s: between two turns.
        """
        self._read = read
        self._sink = sink
        self._every_s = every_s
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self._failures = 0
        self._stop = threading.Event()

    def start(self) -> Exporter:
        """Export from now on, in a thread of its own; returns itself."""
        threading.Thread(target=self._run, name="paceline-metrics", daemon=True).start()
        return self

    def stop(self) -> None:
        """End the thread within a turn."""
        self._stop.set()

    def turn(self) -> None:
        """Read once and export; what fails is left out and tried again with the next turn."""
        try:
            for sample in self._read():
                try:
                    self._export(sample)
                except Exception as error:
                    self._failed(f"{sample.name}{sample.labels}", error)
        except Exception as error:
            self._failed("the figures", error)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.turn()

    def _export(self, sample: Sample) -> None:
        metric = BY_NAME[sample.name]
        if not math.isfinite(sample.value):
            return
        labels = dict(zip(metric.labels, sample.labels, strict=True))
        if metric.kind is not Kind.COUNTER:
            self._sink.record(metric, sample.value, labels)
            return
        key = sample.name, sample.labels
        before = self._totals.get(key)
        # A total that has fallen was counted anew; a series that begins at 0 shows its first rise.
        increase = sample.value - (before if before is not None and before <= sample.value else 0.0)
        if increase > 0.0 or before is None:
            self._sink.record(metric, increase, labels)
        self._totals[key] = sample.value

    def _failed(self, what: str, error: Exception) -> None:
        if self._failures % _WARN_EVERY == 0:
            logger.warning("%s could not be exported, going on: %r", what, error)
        self._failures += 1
