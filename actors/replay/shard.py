"""The replay shard: the actor that keeps one topic's records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.actors.replay.journal import Journal
from paceline.actors.replay.record import RecordError, decode, is_held_out
from paceline.actors.replay.table import Entry, ReplaySettings, ReplayTable, Split

logger = logging.getLogger(__name__)


class ReplayShard:
    """Records of one topic, both splits.

    With a ``persist_dir`` they also lie in a file there and survive the actor's death; without
    one they live in memory alone and a killed shard starts empty.
    """

    def __init__(
        self,
        topic: str,
        settings: ReplaySettings | None = None,
        persist_dir: str | None = None,
        *,
        seed: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Come back with the persisted records, if any.

        Args:
            topic: whose records these are.
            settings: capacity, retention, split.
            persist_dir: folder for ``<topic>.records``.
            seed: of sampling; None is unseeded.
            clock: unix seconds.
        """
        self._topic = topic
        self._settings = settings or ReplaySettings()
        self._table = ReplayTable(self._settings)
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self._refused = 0
        self._journal: Journal | None = None
        if persist_dir is not None:
            self._journal = Journal(Path(persist_dir) / f"{topic}.records")
            for data in self._journal.read():
                self._keep(data)
            self._compact()

    def insert(self, data: bytes) -> None:
        """Take an encoded record; bytes that are none are counted and dropped."""
        if not self._keep(data) or self._journal is None:
            return
        self._journal.append(data)
        if self._journal.size > 2 * self._settings.capacity_bytes:
            self._compact()

    def sample(self, n: int, split: Split) -> list[bytes]:
        """At most ``n`` different encoded records of a split, recent ones favoured."""
        return self._table.sample(n, split, self._clock(), self._rng)

    def delete(self, request_id: str | None) -> int:
        """Drop a request's records, or with None all, from memory and disk; returns how many."""
        removed = self._table.delete(request_id)
        self._compact()
        return removed

    def stats(self) -> dict[str, Any]:
        """Topic, counts per split, bytes, inserts and refusals since the start."""
        counts = self._table.stats(self._clock())
        return {"topic": self._topic, **counts, "refused_total": self._refused}

    def ping(self) -> bool:
        """True: the actor answers."""
        return True

    def _keep(self, data: bytes) -> bool:
        try:
            record = decode(data)
        except RecordError as error:
            self._refused += 1
            logger.warning("%s: %s", self._topic, error)
            return False
        held_out = is_held_out(record.prompt_token_ids, self._settings.held_out_fraction)
        entry = Entry(record.request_id, record.created, bytes(data))
        self._table.insert(entry, "held_out" if held_out else "train", self._clock(), self._rng)
        return True

    def _compact(self) -> None:
        """Have the file hold what the table holds, and nothing else."""
        if self._journal is not None:
            self._journal.rewrite(entry.data for _, entry in self._table.entries())
