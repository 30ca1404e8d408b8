"""Weights of experts per topic by measured acceptance: discounted Hedge. Pure.

A topic's weights sum to 1 and start at a prior. A *row* holds the acceptance of all experts scored
on one answer: full information, also of experts that do not serve. A row updates weights by

    w_e  <-  prior_e^(1 - discount) * (w_e * exp(rate * gain_e))^discount,  normalised

which is Hedge (Freund and Schapire 1997) over gains that are forgotten geometrically: the
discounted regret of the weighted mixture against any expert e is at most
ln(1 / prior_e) / rate + rate / 8 * (sum of the discounts), whatever the gains, by Hoeffding's
lemma and Jensen's inequality (compare Chernov and Zhdanov, arXiv 1005.1918). An expert missing in
a row keeps its weight, the others share theirs ("specialists", Freund et al. 1997).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.actors.general import GENERAL
from paceline.actors.router.key_scope import may_draft

STATE_VERSION = 1
_MIN_WEIGHT = 1e-100  # many incomplete rows could reach 0


@dataclass(frozen=True, slots=True)
class HedgeSettings:
    """Learning rate, forgetting and prior.

    Attributes:
        rate: learning rate, per unit of acceptance.
        discount: of earlier rows by each further one, in (0, 1).
        window: rows kept per topic.
        own: prior weight of the topic's own expert.
        general: prior weight of the generalist; the other experts share the rest.
    """

    rate: float = 2.0
    discount: float = 0.97
    window: int = 64
    own: float = 0.6
    general: float = 0.3


def prior(topic: str, experts: Iterable[str], settings: HedgeSettings) -> dict[str, float]:
    """Weights without any row; they sum to 1.

    Args:
        topic: its own expert, if there is one, is slightly preferred to ``general``.
        experts: all of them, ``general`` included.
        settings: see HedgeSettings.
    """
    names = list(experts)
    own = topic if topic in names else GENERAL
    others = [name for name in names if name not in (own, GENERAL)]
    rest = max(1.0 - settings.own - settings.general, 0.0)
    raw = dict.fromkeys(names, rest / max(len(others), 1))
    raw[GENERAL] = settings.general
    raw[own] = settings.own if own != GENERAL else settings.own + settings.general
    total = math.fsum(raw.values())
    return {name: value / total for name, value in raw.items()}


def updated(
    weights: Mapping[str, float],
    start: Mapping[str, float],
    gains: Mapping[str, float],
    settings: HedgeSettings,
) -> dict[str, float]:
    """The weights after one row.

    Args:
        weights: of all experts, positive, summing to 1.
        start: the prior, of the same experts.
        gains: expert to acceptance in [0, 1]; values that are not finite and unknown experts are
            ignored.
        settings: see HedgeSettings.
    """
    known = {e: g for e, g in gains.items() if e in weights and math.isfinite(g)}
    if len(known) < 2:  # nothing to compare
        return dict(weights)
    kept = settings.discount
    logs = {
        expert: (1.0 - kept) * math.log(start[expert])
        + kept * (math.log(weights[expert]) + settings.rate * min(max(gain, 0.0), 1.0))
        for expert, gain in known.items()
    }
    mass = math.fsum(weights[expert] for expert in known)
    highest = max(logs.values())
    raw = {expert: math.exp(value - highest) for expert, value in logs.items()}
    total = math.fsum(raw.values())
    moved = {expert: max(mass * value / total, _MIN_WEIGHT) for expert, value in raw.items()}
    return {**weights, **moved}


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeTable:
    """The routing table.

    Attributes:
        weights: by topic and expert, of the topics with a row that compares experts.
        acceptance: means, likewise.
        rows: number of them by topic.
        versions: weight_version of the scored experts.
    """

    weights: Mapping[str, Mapping[str, float]]
    acceptance: Mapping[str, Mapping[str, float]]
    rows: Mapping[str, int]
    versions: Mapping[str, int]


class Hedge:
    """Weights of all topics, from the last rows of each.

    They follow from prior and rows alone: gains may come late and in any order, and a new version
    of an expert is scored on the same answers as the others.

    Attributes:
        settings: see HedgeSettings.
        versions: expert to the weight_version of its gains.
    """

    def __init__(self, experts: Iterable[str], settings: HedgeSettings | None = None) -> None:
        """Start at the prior, every expert at version 0.

        Args:
            experts: all of them, ``general`` included; each is a topic too.
            settings: see HedgeSettings.
        """
        self.settings = settings or HedgeSettings()
        self.versions = dict.fromkeys(experts, 0)
        self._rows: dict[str, OrderedDict[str, dict[str, float]]] = {
            topic: OrderedDict() for topic in self.versions
        }

    def add_expert(self, expert: str) -> None:
        """Add an expert and its topic at the prior, unless it is known.

        It keeps its prior weight in other topics' present rows.
        """
        self.versions.setdefault(expert, 0)
        self._rows.setdefault(expert, OrderedDict())

    def add_row(self, topic: str, key: str) -> list[str]:
        """Add an empty row to a topic; returns the keys of rows that left the window.

        Raises:
            KeyError: for an unknown topic.
        """
        rows = self._rows[topic]
        rows.setdefault(key, {})
        return [rows.popitem(last=False)[0] for _ in range(len(rows) - self.settings.window)]

    def remove_rows(self, matches: Callable[[str, str], bool]) -> None:
        """Remove the rows whose topic and key match."""
        for topic, rows in self._rows.items():
            for key in [key for key in rows if matches(topic, key)]:
                del rows[key]

    def set_version(self, expert: str, version: int) -> bool:
        """Set an expert's weight_version; a new one removes its gains. Whether it is new."""
        if expert not in self.versions or self.versions[expert] == version:
            return False
        self.versions[expert] = version
        for rows in self._rows.values():
            for gains in rows.values():
                gains.pop(expert, None)
        return True

    def add_gain(self, topic: str, key: str, expert: str, gain: float) -> None:
        """Add an expert's acceptance to a row, if it is finite and the row exists."""
        row = self._rows[topic].get(key) if topic in self._rows else None
        if row is not None and expert in self.versions and math.isfinite(gain):
            row[expert] = gain

    def weights(self, topic: str) -> dict[str, float]:
        """Expert to weight, of those that may draft for the topic; they sum to 1."""
        experts = [expert for expert in self.versions if may_draft(expert, topic)]
        start = prior(topic, experts, self.settings)
        weights = dict(start)
        for gains in self._rows[topic].values():
            weights = updated(weights, start, gains, self.settings)
        return weights

    def table(self) -> HedgeTable:
        """The routing table."""
        measured = [t for t, rows in self._rows.items() if any(len(r) > 1 for r in rows.values())]
        return HedgeTable(
            weights={topic: self.weights(topic) for topic in measured},
            acceptance={topic: self._means(topic) for topic in measured},
            rows={topic: len(rows) for topic, rows in self._rows.items()},
            versions=dict(self.versions),
        )

    def _means(self, topic: str) -> dict[str, float]:
        rows = self._rows[topic].values()
        known = {e: [row[e] for row in rows if e in row] for e in self.versions}
        return {e: math.fsum(gains) / len(gains) for e, gains in known.items() if gains}

    def export(self) -> dict[str, object]:
        """State as plain data, for :meth:`restore`."""
        rows = {
            topic: [[key, dict(gains)] for key, gains in rows.items() if gains]
            for topic, rows in self._rows.items()
        }
        return {"state": STATE_VERSION, "versions": dict(self.versions), "rows": rows}

    def restore(self, data: Any) -> None:
        """Replace the state; unknown topics and experts are left out.

        Raises:
            ValueError: not a state of this version; nothing has changed.
        """
        try:
            if data["state"] != STATE_VERSION:
                raise ValueError(f"hedge: state {data['state']!r}, this code reads {STATE_VERSION}")
            versions = {str(e): int(v) for e, v in data["versions"].items()}
            rows = {
                str(topic): [
                    (str(key), {str(e): float(g) for e, g in gains.items()}) for key, gains in own
                ]
                for topic, own in data["rows"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"hedge: no state ({error!r})") from error
        for expert in self.versions:
            self.versions[expert] = versions.get(expert, 0)
        for topic, own in self._rows.items():
            own.clear()
            for key, gains in rows.get(topic, [])[-self.settings.window :]:
                self.add_row(topic, key)
                for expert, gain in gains.items():
                    self.add_gain(topic, key, expert, gain)
