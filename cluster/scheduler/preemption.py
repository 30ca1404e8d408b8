"""Preemption of trainers for pending replicas of Serve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from paceline.actors.training.permits import ResourceSlot
from paceline.cluster.scheduler.leases import Amounts, ReplicaDemand, SchedulerSettings

_EPSILON = 1e-6  # Ray books in ten-thousandths and adds up in floats
_MAX_REPLICAS = 256  # considered at once


def select_preemptions(
    demands: Iterable[ReplicaDemand],
    free: Mapping[str, Amounts] | None,
    booked: Sequence[ResourceSlot],
) -> set[str]:
    """Choose trainers to preempt for pending replicas: few on each node, on few nodes.

    A replica that fits already, or that would not fit without all trainers, preempts none.
    Trainers on an unknown node come last.

    Args:
        demands: pending replicas.
        free: node to unbooked resources; None if unknown: every trainer that books a resource in
            demand is preempted.
        booked: slots of the trainers that may be preempted, named after them.
    """
    wanted = [demand.amounts for demand in demands for _ in range(demand.count)][:_MAX_REPLICAS]
    if free is None:
        return {s.name for s in booked if any(overlaps(s.amounts, a) for a in wanted)}
    left = {node: dict(amounts) for node, amounts in free.items()}
    selected: set[str] = set()
    for amounts in wanted:
        remaining = [s for s in booked if s.name not in selected and overlaps(s.amounts, amounts)]
        best = _best_node(amounts, left, remaining)
        if best is None:
            continue
        node, preempted = best
        for slot in preempted:
            selected.add(slot.name)
            _add(left[node], slot.amounts)
        _add(left[node], amounts, -1.0)
    return selected


def fits(amounts: Amounts, free: Amounts) -> bool:
    """Whether the amounts fit into the free resources of one node."""
    return all(free.get(name, 0.0) >= need - _EPSILON for name, need in amounts.items())


def overlaps(booked: Amounts, wanted: Amounts) -> bool:
    """Whether some wanted resource is booked."""
    return any(booked.get(name, 0.0) > 0.0 and need > 0.0 for name, need in wanted.items())


def _best_node(
    amounts: Amounts, left: Mapping[str, Amounts], remaining: Sequence[ResourceSlot]
) -> tuple[str, list[ResourceSlot]] | None:
    """The node with the fewest preemptions, and those; None if none makes room."""
    best: tuple[str, list[ResourceSlot]] | None = None
    for node, free in left.items():
        local = [s for s in remaining if s.node == node] + [s for s in remaining if s.node is None]
        preempted = _preempted(amounts, free, local)
        if preempted is not None and (best is None or len(preempted) < len(best[1])):
            best = node, preempted
    return best


def _preempted(
    amounts: Amounts, free: Amounts, local: Sequence[ResourceSlot]
) -> list[ResourceSlot] | None:
    available, preempted = dict(free), []
    for slot in local:
        if fits(amounts, available):
            break
        lacking = {
            name: need for name, need in amounts.items() if not fits({name: need}, available)
        }
        if overlaps(slot.amounts, lacking):
            preempted.append(slot)
            _add(available, slot.amounts)
    return preempted if fits(amounts, available) else None


def _add(available: dict[str, float], amounts: Amounts, sign: float = 1.0) -> None:
    for name, amount in amounts.items():
        available[name] = available.get(name, 0.0) + sign * amount


class PreemptionTracker:
    """Pending replicas, bookings of trainers, and the preemptions that follow.

    Attributes:
        preempted: trainers that were ended and not started again.
        selected: trainers to preempt now.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._booked: dict[str, Amounts] = {}
        self._ended: dict[str, tuple[float, str | None]] = {}  # trainer: when, on which node
        self._demands: tuple[ReplicaDemand, ...] = ()
        self._free: Mapping[str, Amounts] | None = None
        self._reported_at = self._last_demand = -math.inf
        self._fragmented_since = math.inf
        self.preempted: set[str] = set()
        self.selected: set[str] = set()

    def sync(self, booked: Mapping[str, Amounts], preempted: Iterable[str]) -> None:
        """Take what Ray books for each trainer, and the trainers that are ended."""
        self._booked = {name: dict(amounts) for name, amounts in booked.items()}
        self.preempted = set(preempted)

    @property
    def trainers(self) -> int:
        """Trainers that are to run, ended ones too."""
        return len(self._booked)

    def report(
        self, demands: Iterable[ReplicaDemand], free: Mapping[str, Amounts] | None, now: float
    ) -> None:
        """Take pending replicas and free resources by node; expires after ``pending_stale_s``."""
        self._demands = tuple(demand for demand in demands if demand.count > 0)
        self._free, self._reported_at = free, now

    def pending(self, now: float) -> int:
        """Replicas that wait for resources."""
        return sum(demand.count for demand in self._current(now))

    def select(self, nodes: Mapping[str, str | None], now: float) -> set[str]:
        """Update and return ``selected``.

        Ray reports the free GPUs of a node, and books a fraction on one device. Of a replica that
        still waits with room on a node, the trainers there are preempted one by one.

        Args:
            nodes: trainer to its node.
            now: monotonic seconds.
        """
        demands = self._current(now)
        slots = [
            ResourceSlot(name, nodes.get(name), amounts)
            for name, amounts in self._booked.items()
            if name not in self.preempted and any(amounts.values())
        ]
        if any(overlaps(a, d.amounts) for a in self._booked.values() for d in demands):
            self._last_demand = now
        free = self._expected_free(now)
        if free is not None and any(node is None for _, node in self._ended.values()):
            # Which node has the ended one's resources will be in Ray's next figures.
            slots = [slot for slot in slots if slot.node is not None]
        self.selected = select_preemptions(demands, free, slots)
        fragmenting = [] if self.selected else self._fragmenting(demands, slots)
        self._fragmented_since = min(self._fragmented_since, now) if fragmenting else math.inf
        if now - self._fragmented_since >= self._settings.settle_s:
            self.selected = {fragmenting[0]}
        return self.selected

    def _fragmenting(
        self, demands: Iterable[ReplicaDemand], slots: Iterable[ResourceSlot]
    ) -> list[str]:
        """Trainers with GPUs of nodes whose free ones, all devices together, would do."""
        nodes = {
            node
            for node, free in (self._free or {}).items()
            if any(d.amounts.get("GPU", 0.0) > 0.0 and fits(d.amounts, free) for d in demands)
        }
        return [s.name for s in slots if s.node in nodes and s.amounts.get("GPU", 0.0) > 0.0]

    def ended(self, name: str, node: str | None, now: float) -> None:
        """Count the resources of a trainer as free until Ray's figures show them."""
        self._ended[name] = now, node
        self._fragmented_since = math.inf
        self.preempted.add(name)
        self.selected.discard(name)

    def restart(self, now: float) -> str | None:
        """A preempted trainer that fits again, at most one per report; None without."""
        quiet = now - self._last_demand >= self._settings.restart_after_s
        if not quiet or now - self._reported_at > self._settings.pending_stale_s:
            return None
        for name in sorted(self.preempted):
            amounts = self._booked.get(name, {})
            if self._free is None or any(fits(amounts, free) for free in self._free.values()):
                self.preempted.discard(name)
                self._reported_at = -math.inf
                return name
        return None

    def _current(self, now: float) -> tuple[ReplicaDemand, ...]:
        current = now - self._reported_at <= self._settings.pending_stale_s
        return self._demands if current else ()

    def _expected_free(self, now: float) -> Mapping[str, Amounts] | None:
        """Free resources by node, with those of trainers that have just ended."""
        if self._free is None:
            return None
        free = {node: dict(amounts) for node, amounts in self._free.items()}
        for name, (when, node) in list(self._ended.items()):
            if now - when > self._settings.settle_s:
                del self._ended[name]
            elif node in free:
                _add(free[node], self._booked.get(name, {}))
        return free
