"""docs/metrics.md from the catalogue: ``python -m paceline.deploy.monitoring.tables`` prints it."""

from __future__ import annotations

import sys

from paceline.deploy.monitoring.catalogue import METRICS, PARTS, Metric

_HEAD = """# Metrics

What Paceline exports through Ray, by the part that does. Written from
`deploy/monitoring/catalogue.py` by `python -m paceline.deploy.monitoring.tables > docs/metrics.md`.
[operations.md](operations.md#monitoring) says how to see them.

Names are as Prometheus has them. A histogram's are `_bucket`, `_sum` and `_count`; Ray carries the
buckets, not the values, so that quantiles are as fine as the buckets and `_sum` is what their
middles give. Ray adds labels of its own (`SessionName`, `NodeAddress`, `WorkerId` ...), and
what target and ingress export also has `application`, `deployment` and `replica`.
"""
_WHO = {
    "target": "Target replicas",
    "ingress": "Ingress replicas",
    "registry": "Weight registry",
    "shard": "Replay shards",
    "trainer": "Trainer",
    "board": "Load board",
}


def text() -> str:
    """The document."""
    sections = [_HEAD]
    for part in PARTS:
        rows = [_row(metric) for metric in METRICS if metric.part == part]
        head = f"## {_WHO[part]}\n\n| name | kind | labels | what |\n|---|---|---|---|\n"
        sections.append(head + "\n".join(rows) + "\n")
    return "\n".join(sections)


def _row(metric: Metric) -> str:
    name = metric.series[0].removesuffix("_bucket")
    labels = ", ".join(metric.labels) or "-"
    return f"| `{name}` | {metric.kind} | {labels} | {metric.help} |"


if __name__ == "__main__":
    sys.stdout.write(text())
