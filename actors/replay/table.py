"""A replay table: the records of one split in a bounded number of bytes. Pure.

Samplers give each record's probability to be drawn; removers choose which records go when the
table is full.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.actors.replay.record import belongs

Remover = Literal["fifo", "reservoir", "priority"]
Sampler = Literal["recency", "priority"]

_MIN_RELATIVE_LOSS = 1e-3  # no record's weight is 0


def recency_weights(count: int, recent_share: float, half_life: float) -> NDArray[np.float64]:
    """Probability of each of ``count`` records, oldest first; they sum to 1.

    Args:
        count: records.
        recent_share: weight of the recency part; the rest is uniform.
        half_life: records after which the recency part has halved.
    """
    if count == 0:
        return np.zeros(0)
    recency = np.exp2(-np.arange(count - 1, -1, -1) / half_life)
    weights = recent_share * recency / recency.sum() + (1.0 - recent_share) / count
    normal: NDArray[np.float64] = weights / weights.sum()
    return normal


def priority_weights(
    losses: NDArray[np.float64], priority_share: float, exponent: float
) -> NDArray[np.float64]:
    """Probability of each record, higher for a higher loss; they sum to 1.

    Args:
        losses: float64 ``[R]``, nats; inf if unknown, which counts as the highest one. A loss
            below a thousandth of the highest one counts as that much.
        priority_share: weight of the part proportional to loss ** exponent; the rest is uniform.
        exponent: at least 0.
    """
    if len(losses) == 0:
        return np.zeros(0)
    known = np.isfinite(losses)
    highest = float(losses[known].max()) if known.any() else 0.0
    highest = highest if highest > 0.0 else 1.0
    relative = np.where(known, losses, highest) / highest
    relative = np.power(relative.clip(min=_MIN_RELATIVE_LOSS), exponent)
    weights = priority_share * relative / relative.sum() + (1.0 - priority_share) / len(losses)
    normal: NDArray[np.float64] = weights / weights.sum()
    return normal


def reservoir_key(request_id: str) -> float:
    """Rank in [0, 1) of a record in a reservoir, which keeps the highest ones.

    The key is a hash of the name ("bottom-k", Cohen and Kaplan, PODC 2007), so a table restored
    from disk continues the same sample; a count of arrivals would be lost.

    A record is removed only for records with higher keys, so the table holds a uniform sample of
    everything since it last had free space. Space freed by expiry goes to the next records. To
    stay uniform there too, a table would have to refuse every key below the highest one removed
    within retention, which leaves it nearly empty for days after a burst.
    """
    return int.from_bytes(blake2b(request_id.encode(), digest_size=6).digest(), "big") / 2.0**48


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """An encoded record with the fields that a table needs.

    Attributes:
        request_id: name of the record.
        created: unix seconds.
        data: see :func:`record.encode`.
        key: see :func:`reservoir_key`.
    """

    request_id: str
    created: float
    data: bytes
    key: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", reservoir_key(self.request_id))


class Table:
    """Records of one split, oldest first.

    Attributes:
        capacity: bytes.
        bytes: of all records.
        inserted: records offered since the start.
        evicted: records removed, or not kept, for lack of space since the start.
        expired: records removed by age since the start.
    """

    def __init__(self, capacity_bytes: int, remover: Remover) -> None:
        self.capacity = capacity_bytes
        self._remover = remover
        self._records: deque[EncodedRecord] = deque()
        self._losses: dict[str, float] = {}  # by request_id, of records in the table
        self._oldest = math.inf  # lower bound of their creation times
        self.bytes = 0
        self.inserted = self.evicted = self.expired = 0

    def __len__(self) -> int:
        """Number of records."""
        return len(self._records)

    def records(self) -> list[EncodedRecord]:
        """All records, oldest first."""
        return list(self._records)

    def __contains__(self, request_id: str) -> bool:
        return any(record.request_id == request_id for record in self._records)

    def insert(self, record: EncodedRecord) -> bool:
        """Insert a record and remove others, or this one, until all fit; whether it was kept."""
        self.inserted += 1
        size = len(record.data)
        if size > self.capacity:
            self.evicted += 1
            return False
        full = self.bytes + size > self.capacity
        if full and self._remover == "reservoir":
            removable = sum(len(r.data) for r in self._records if r.key < record.key)
            if self.bytes - removable + size > self.capacity:
                self.evicted += 1
                return False
        if full:
            self._free(size)
        self._records.append(record)
        self._oldest = min(self._oldest, record.created)
        self.bytes += size
        return True

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity; the remover applies if the records no longer fit."""
        self.capacity = capacity_bytes
        if self.bytes > self.capacity:
            self._free(0)

    def losses(self) -> NDArray[np.float64]:
        """The latest loss of each record, oldest first; inf if no trainer has seen it."""
        return np.array([self._losses.get(r.request_id, math.inf) for r in self._records])

    def update_losses(self, losses: Mapping[str, float]) -> None:
        """Store losses by request_id; those of unknown records or not finite are ignored."""
        known = {record.request_id for record in self._records}
        self._losses.update(
            (name, loss) for name, loss in losses.items() if name in known and math.isfinite(loss)
        )

    def expire(self, before: float) -> None:
        """Remove records created before a unix time."""
        if self._oldest < before:
            kept = [record for record in self._records if record.created >= before]
            self.expired += len(self._records) - len(kept)
            self._replace(kept)

    def delete(self, request_id: str | None) -> int:
        """Remove a request's records, or all; returns how many.

        An answer with several choices has a record per choice, named by the answer and a number.
        """
        kept = [r for r in self._records if not belongs(r.request_id, request_id)]
        removed = len(self._records) - len(kept)
        if removed:
            self._replace(kept)
        return removed

    def sample(
        self, n: int, weights: NDArray[np.float64], rng: np.random.Generator
    ) -> list[EncodedRecord]:
        """At most ``n`` different records, drawn with these weights; all if there are fewer."""
        count = min(n, len(self._records))
        if count <= 0:
            return []
        chosen = rng.choice(len(self._records), size=count, replace=False, p=weights)
        return [self._records[int(index)] for index in chosen]

    def _free(self, size: int) -> None:
        """Remove records of the lowest priority, the oldest of equals, until ``size`` bytes fit."""
        if self._remover == "fifo":
            while self.bytes + size > self.capacity:
                self._remove_oldest()
            return
        by_key = self._remover == "reservoir"
        priorities = np.array([r.key for r in self._records]) if by_key else self.losses()
        removed: set[int] = set()
        free = self.capacity - self.bytes
        for index in np.argsort(priorities, kind="stable").tolist():
            if free >= size:
                break
            removed.add(index)
            free += len(self._records[index].data)
        self.evicted += len(removed)
        self._replace([record for i, record in enumerate(self._records) if i not in removed])

    def _remove_oldest(self) -> None:
        record = self._records.popleft()
        self.evicted += 1
        self.bytes -= len(record.data)
        self._losses.pop(record.request_id, None)

    def _replace(self, records: list[EncodedRecord]) -> None:
        self._records = deque(records)
        known = {record.request_id for record in records}
        self._losses = {name: loss for name, loss in self._losses.items() if name in known}
        self._oldest = min((record.created for record in records), default=math.inf)
        self.bytes = sum(len(record.data) for record in records)
