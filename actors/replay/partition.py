"""Records of one split within so many bytes: which stay, which make way. Pure."""

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


@dataclass(frozen=True, slots=True)
class Entry:
    """An encoded record and what the table must know of it."""

    request_id: str
    created: float
    data: bytes
    lot: float = field(init=False)

    def __post_init__(self) -> None:
        """Draw the lot: for every record of a name the same."""
        object.__setattr__(self, "lot", lot(self.request_id))


class Partition:
    """Records of one split, oldest first.

    Since the start, ``evicted`` records had no room or made way, and ``expired`` ones were past
    retention.
    """

    def __init__(self, capacity_bytes: int, remover: Remover) -> None:
        """Start empty."""
        self.capacity = capacity_bytes
        self._remover = remover
        self._entries: deque[Entry] = deque()
        self._losses: dict[str, float] = {}  # by request, of what is kept
        self._oldest = math.inf  # a lower bound of what is kept: no need to look below it
        self.bytes = 0
        self.inserted = self.evicted = self.expired = 0

    def __len__(self) -> int:
        """How many records are kept."""
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """All of them, oldest first."""
        return list(self._entries)

    def has(self, request_id: str) -> bool:
        """Whether a record of this name is kept."""
        return any(entry.request_id == request_id for entry in self._entries)

    def insert(self, entry: Entry) -> bool:
        """Take a record and drop others, or this one, until all fit; whether it was kept."""
        self.inserted += 1
        size = len(entry.data)
        if size > self.capacity:
            self.evicted += 1
            return False
        full = self.bytes + size > self.capacity
        if full and self._remover == "reservoir":
            weaker = [e for e in self._entries if e.lot < entry.lot]
            if self.bytes - sum(len(e.data) for e in weaker) + size > self.capacity:
                self.evicted += 1
                return False
        if full:
            self._make_room(size)
        self._entries.append(entry)
        self._oldest = min(self._oldest, entry.created)
        self.bytes += len(entry.data)
        return True

    def limit(self, capacity_bytes: int) -> None:
        """Have another capacity from now on; records make way as they do for a further one."""
        self.capacity = capacity_bytes
        if self.bytes > self.capacity:
            self._make_room(0)

    def losses(self) -> NDArray[np.float64]:
        """The latest loss of each record, oldest first; inf where no trainer has seen it."""
        return np.array([self._losses.get(e.request_id, math.inf) for e in self._entries])

    def update_losses(self, losses: Mapping[str, float]) -> None:
        """Take losses by request; of records that are gone, or not finite, nothing is noted."""
        kept = {entry.request_id for entry in self._entries}
        self._losses.update(
            (name, loss) for name, loss in losses.items() if name in kept and math.isfinite(loss)
        )

    def expire(self, before: float) -> None:
        """Drop records created before a unix time."""
        if self._oldest < before:
            kept = [entry for entry in self._entries if entry.created >= before]
            self.expired += len(self._entries) - len(kept)
            self._keep(kept)

    def delete(self, request_id: str | None) -> int:
        """Drop a request's records, or all; returns how many.

        Of an answer with several choices each has a record, named by the answer and its number.
        """
        kept = (
            []
            if request_id is None
            else [e for e in self._entries if not belongs(e.request_id, request_id)]
        )
        removed = len(self._entries) - len(kept)
        if removed:
            self._keep(kept)
        return removed

    def sample(self, n: int, weights: NDArray[np.float64], rng: np.random.Generator) -> list[bytes]:
        """At most ``n`` different records, drawn with these weights; all where there are fewer."""
        count = min(n, len(self._entries))
        if count <= 0:
            return []
        chosen = rng.choice(len(self._entries), size=count, replace=False, p=weights)
        return [self._entries[int(index)].data for index in chosen]

    def _make_room(self, size: int) -> None:
        """Drop records of the least worth, the oldest of equals, until ``size`` bytes fit."""
        if self._remover == "fifo":
            while self.bytes + size > self.capacity:
                self._drop_oldest()
            return
        by_lot = self._remover == "reservoir"
        worth = np.array([e.lot for e in self._entries]) if by_lot else self.losses()
        gone: set[int] = set()
        room = self.capacity - self.bytes
        for index in np.argsort(worth, kind="stable").tolist():
            if room >= size:
                break
            gone.add(index)
            room += len(self._entries[index].data)
        self.evicted += len(gone)
        self._keep([entry for i, entry in enumerate(self._entries) if i not in gone])

    def _drop_oldest(self) -> None:
        entry = self._entries.popleft()
        self.evicted += 1
        self.bytes -= len(entry.data)
        self._losses.pop(entry.request_id, None)

    def _keep(self, entries: list[Entry]) -> None:
        self._entries = deque(entries)
        kept = {entry.request_id for entry in entries}
        self._losses = {name: loss for name, loss in self._losses.items() if name in kept}
        self._oldest = min((entry.created for entry in entries), default=math.inf)
        self.bytes = sum(len(entry.data) for entry in entries)


def lot(request_id: str) -> float:
    """The number in [0, 1) that a record has drawn for a reservoir: those of the highest stay.

    A record's lot is a hash of its name, so that a table that comes back from disk goes on with the
    same sample ("bottom-k", Cohen and Kaplan, PODC 2007); a count of arrivals would be lost.

    A record makes way for higher lots alone, so that what is kept is uniform over all that came
    since there was room last. Room that opens by expiry goes to whatever comes next. Only above the
    highest lot that was let go within retention would the sample stay uniform there too, and after
    a burst that rule leaves nearly all the room empty for days.
    """
    return int.from_bytes(blake2b(request_id.encode(), digest_size=6).digest(), "big") / 2.0**48
