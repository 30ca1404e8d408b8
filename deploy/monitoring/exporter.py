"""Export counts as Ray metrics once a second, from a thread beside the work.

The work never waits for the export, and an error skips only the sample that raised it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from ray.util import metrics as ray_metrics

from paceline.deploy.monitoring.catalogue import BY_NAME, Kind, Metric

logger = logging.getLogger(__name__)
Actor = TypeVar("Actor")

EVERY_S = 1.0  # a gauge that is not recorded between two of Ray's reports is gone until it is
_WARN_EVERY = 600  # failures per log line


class Sample(NamedTuple):
    """A current value of a metric.

    Attributes:
        name: of a metric of the catalogue.
        value: a counter's total since the process started, a gauge's value, or one observation of
            a histogram.
        labels: values of the metric's labels, in their order.
    """

    name: str
    value: float
    labels: tuple[str, ...] = ()


class Sink(Protocol):
    """Destination of metrics."""

    def record(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Increase a counter (0 creates its series), set a gauge, or observe; may raise."""


class RaySink:
    """Record into Ray's metrics, each created at its first value; for one thread.

    Args:
        module: `ray.util.metrics` in actors, `ray.serve.metrics` in deployments.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._metrics: dict[str, Any] = {}

    def record(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """See Sink."""
        own = self._metrics.get(metric.name)
        if own is None:
            own = self._metrics[metric.name] = self._create(metric)
        if metric.kind is Kind.GAUGE:
            own.set(value, dict(labels))
        elif metric.kind is Kind.HISTOGRAM:
            own.observe(value, dict(labels))
        elif value > 0.0:
            own.inc(value, dict(labels))
        else:  # `inc` rejects 0, the first value of a series
            own._record(0.0, dict(labels))

    def _create(self, metric: Metric) -> Any:
        options: dict[str, Any] = {"description": metric.help, "tag_keys": metric.labels}
        if metric.kind is Kind.HISTOGRAM:
            options["boundaries"] = list(metric.buckets)
        return getattr(self._module, metric.kind.name.title())(metric.full_name, **options)


class Exporter:
    """Export samples: increases of counters, values of gauges, observations of histograms.

    Args:
        read: the current samples; called on the exporter's thread, may raise.
        sink: destination.
        every_s: interval, seconds.
    """

    def __init__(
        self, read: Callable[[], Iterable[Sample]], sink: Sink, every_s: float = EVERY_S
    ) -> None:
        self._read = read
        self._sink = sink
        self._every_s = every_s
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self._failures = 0
        self._stop = threading.Event()

    def start(self) -> Exporter:
        """Start the thread; returns self."""
        threading.Thread(target=self._run, name="paceline-metrics", daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop the thread within an interval."""
        self._stop.set()

    def export(self) -> None:
        """Read and export once; a failed increase is exported with the next."""
        try:
            for sample in self._read():
                try:
                    self._record(sample)
                except Exception as error:
                    self._warn(f"{sample.name}{sample.labels}", error)
        except Exception as error:
            self._warn("metrics", error)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.export()

    def _record(self, sample: Sample) -> None:
        metric = BY_NAME[sample.name]
        if not math.isfinite(sample.value):
            return
        labels = dict(zip(metric.labels, sample.labels, strict=True))
        if metric.kind is not Kind.COUNTER:
            self._sink.record(metric, sample.value, labels)
            return
        key = sample.name, sample.labels
        before = self._totals.get(key)
        # A smaller total was reset. A series must start at 0, or its first rise is not seen.
        increase = sample.value - (before if before is not None and before <= sample.value else 0.0)
        if increase > 0.0 or before is None:
            self._sink.record(metric, increase, labels)
        self._totals[key] = sample.value

    def _warn(self, what: str, error: Exception) -> None:
        if self._failures % _WARN_EVERY == 0:
            logger.warning("%s could not be exported, will retry: %r", what, error)
        self._failures += 1


def metered(actor: type[Actor], samples: Callable[[Actor], Iterable[Sample]]) -> type[Actor]:
    """A subclass of an actor class that exports metrics, named ``Metered`` and its name.

    Args:
        actor: a class.
        samples: the current samples of an instance.
    """

    class Metered(actor):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._exporter = Exporter(lambda: samples(self), RaySink(ray_metrics)).start()

    Metered.__name__ = Metered.__qualname__ = f"Metered{actor.__name__}"
    return Metered
