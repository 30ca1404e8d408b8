"""Ray's metrics as a sink: `ray.util.metrics` in actors, `ray.serve.metrics` in deployments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.deploy.monitoring.catalogue import Kind, Metric


class RaySink:
    """Makes each of Ray's metrics when it is first recorded; one thread alone uses it."""

    def __init__(self, metrics: Any) -> None:
        """Take the module whose Counter, Gauge and Histogram are to be used."""
        self._module = metrics
        self._made: dict[str, Any] = {}

    def record(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """See Sink."""
        made = self._made.get(metric.name)
        if made is None:
            made = self._made[metric.name] = self._make(metric)
        if metric.kind is Kind.GAUGE:
            made.set(value, dict(labels))
        elif metric.kind is Kind.HISTOGRAM:
            made.observe(value, dict(labels))
        elif value > 0.0:
            made.inc(value, dict(labels))
        else:  # `inc` refuses 0, with which a series has to begin
            made._record(0.0, dict(labels))

    def _make(self, metric: Metric) -> Any:
        facts: dict[str, Any] = {"description": metric.help, "tag_keys": metric.labels}
        if metric.kind is Kind.HISTOGRAM:
            facts["boundaries"] = list(metric.buckets)
        kinds = {Kind.COUNTER: "Counter", Kind.GAUGE: "Gauge", Kind.HISTOGRAM: "Histogram"}
        return getattr(self._module, kinds[metric.kind])(metric.full_name, **facts)
