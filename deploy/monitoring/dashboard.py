"""The Grafana dashboard as JSON: ``python -m paceline.deploy.monitoring.dashboard`` prints it."""

from __future__ import annotations

import json
import sys
from typing import Any

from paceline.deploy.monitoring.draft_panels import LEARNING, SPECULATION
from paceline.deploy.monitoring.promql import Panel
from paceline.deploy.monitoring.serving_panels import REPLAY, REQUESTS, ROUTING

UID = "paceline"
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Speculation", SPECULATION),
    ("Learning", LEARNING),
    ("Replay", REPLAY),
    ("Requests", REQUESTS),
    ("Routing", ROUTING),
)
# A version begins to draft: its series is there and was not a minute ago.
SWAPS = (
    "sum by (draft, weight_version) (ray_paceline_version_num_drafts) unless "
    "sum by (draft, weight_version) (ray_paceline_version_num_drafts offset 1m)"
)
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
_ON_OFF = {
    "mode": "absolute",
    "steps": [{"color": "transparent", "value": None}, {"color": "green", "value": 1}],
}


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's schema."""
    return {
        "uid": UID,
        "title": "Paceline",
        "description": "Speculative decoding whose drafts learn from the traffic",
        "tags": ["paceline", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": [_swaps()]},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def _swaps() -> dict[str, Any]:
    return {
        "name": "Weight swaps",
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": "purple",
        "expr": SWAPS,
        "step": "10s",
        "titleFormat": "{{draft}} v{{weight_version}} drafts",
        "tagKeys": "draft,weight_version",
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    topics = "label_values(ray_paceline_replay_records, topic)"
    topic = {
        "name": "topic",
        "label": "Topic",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": topics, "refId": "topics"},
        "definition": topics,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }
    return [source | {"query": "prometheus"}, topic]


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
        number = len(panels) + 1
        head = {"id": number, "type": "row", "title": title, "gridPos": place}
        panels.append(head | {"collapsed": False, "panels": []})
        top += 1
        for index, panel in enumerate(row):
            line, column = divmod(index, _COLUMNS // _WIDTH)
            at = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": top + line * _HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, at))
        top += _HEIGHT * -(-len(row) * _WIDTH // _COLUMNS)
    return panels


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.states:
        custom = {"fillOpacity": 80, "lineWidth": 0}
        defaults |= {"color": {"mode": "thresholds"}, "thresholds": _ON_OFF}
    return {
        "id": number,
        "type": "state-timeline" if panel.states else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults | {"custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def text() -> str:
    """The dashboard's file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
