"""Trainers' rooms in Ray's books: who must leave for waiting replicas, and who may return."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from paceline.cluster.leases import LeaseSettings
from paceline.cluster.room import Amounts, Demand, Holder, fits, leavers, touch


class Vacancies:
    """What the trainers' keeper tells of replicas, nodes and trainers, and what follows."""

    def __init__(self, settings: LeaseSettings) -> None:
        """Nobody waits, and no trainer is known.

        Args:
            settings: ``pending_stale_s``, ``settle_s`` and ``return_after_s`` are used.
        """
        self._settings = settings
        self._held: dict[str, Amounts] = {}
        self._left: dict[str, tuple[float, str | None]] = {}  # let go lately: when, from where
        self._demands: tuple[Demand, ...] = ()
        self._free: Mapping[str, Amounts] | None = None
        self._told_at = self._last_demand = -math.inf
        self.absent: set[str] = set()
        self.leaving: set[str] = set()

    def kept(self, held: Mapping[str, Amounts], absent: Iterable[str]) -> None:
        """Take what each trainer books, and which of them were let go and not placed again."""
        self._held = {name: dict(amounts) for name, amounts in held.items()}
        self.absent = set(absent)

    def pending(
        self, demands: Iterable[Demand], free: Mapping[str, Amounts] | None, now: float
    ) -> None:
        """Take which replicas wait and what is free on each node; it holds for a while."""
        self._demands = tuple(demand for demand in demands if demand.count > 0)
        self._free, self._told_at = free, now

    def waiting(self, now: float) -> int:
        """Replicas that wait for room, by the last that was told."""
        return sum(demand.count for demand in self._fresh(now))

    def plan(self, nodes: Mapping[str, str], now: float) -> set[str]:
        """The trainers that are to leave now, also in ``leaving``.

        Args:
            nodes: trainer to its node, where that is known.
            now: monotonic seconds.
        """
        demands = self._fresh(now)
        holders = [
            Holder(name, nodes.get(name), amounts)
            for name, amounts in self._held.items()
            if name not in self.absent and any(amounts.values())
        ]
        if any(touch(a, d.amounts) for a in self._held.values() for d in demands):
            self._last_demand = now
        self.leaving = leavers(demands, self._reckoned(now), holders)
        return self.leaving

    def let_go(self, name: str, node: str | None, now: float) -> None:
        """A trainer is ended; until Ray's figures show it, its room counts as free."""
        self._left[name] = now, node
        self.absent.add(name)
        self.leaving.discard(name)

    def returning(self, now: float) -> str | None:
        """A trainer that there is room for again, None where there is none.

        Only one for each telling of :meth:`pending`: what is left is seen with the next.
        """
        quiet = now - self._last_demand >= self._settings.return_after_s
        if not quiet or now - self._told_at > self._settings.pending_stale_s:
            return None
        for name in sorted(self.absent):
            amounts = self._held.get(name, {})
            if self._free is None or any(fits(amounts, free) for free in self._free.values()):
                self.absent.discard(name)
                self._told_at = -math.inf
                return name
        return None

    def _fresh(self, now: float) -> tuple[Demand, ...]:
        fresh = now - self._told_at <= self._settings.pending_stale_s
        return self._demands if fresh else ()

    def _reckoned(self, now: float) -> Mapping[str, Amounts] | None:
        """What is free, with what those who were let go lately leave."""
        if self._free is None:
            return None
        free = {node: dict(amounts) for node, amounts in self._free.items()}
        for name, (when, node) in list(self._left.items()):
            if now - when > self._settings.settle_s:
                del self._left[name]
            elif node in free:
                for resource, amount in self._held.get(name, {}).items():
                    free[node][resource] = free[node].get(resource, 0.0) + amount
        return free
