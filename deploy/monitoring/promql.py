"""Panels and the PromQL that they ask. Pure.

``RATE`` is the window that Grafana fits to the scrape interval, ``TOPIC`` the dashboard's choice of
topics. A quotient's divisor is held above 0, so that nothing is shown where nothing happened.
"""

from __future__ import annotations

from dataclasses import dataclass

RATE = "$__rate_interval"
TOPIC = 'topic=~"$topic"'


@dataclass(frozen=True, slots=True)
class Query:
    """A line, or several, of a panel: a PromQL expression and a legend with labels in braces."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. ``unit`` is Grafana's word; ``states`` has values drawn as coloured bars."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    stacked: bool = False
    states: bool = False


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Sum of a counter's rates, by some labels."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate(ray_paceline_{metric}_total{{{where}}}[{RATE}]))"


def ratio(over: str, under: str) -> str:
    """A quotient, and nothing where the divisor is 0."""
    return f"{over} / ({under} > 0)"


def gauge(metric: str, by: str = "", where: str = "", how: str = "max") -> str:
    """A gauge over all who export it."""
    group = f" by ({by})" if by else ""
    return f"{how}{group} (ray_paceline_{metric}{{{where}}})"


def quantiles(metric: str) -> tuple[Query, Query]:
    """Median and 99 % of a histogram."""

    def query(share: str, legend: str) -> Query:
        buckets = f"sum by (le) (rate(ray_paceline_{metric}_bucket[{RATE}]))"
        return Query(f"histogram_quantile({share}, {buckets})", legend)

    return query("0.5", "p50"), query("0.99", "p99")
