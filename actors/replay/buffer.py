"""The replay buffer of one topic: a table per split. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from paceline.actors.replay.table import (
    EncodedRecord,
    Remover,
    Sampler,
    Table,
    priority_weights,
    recency_weights,
)

Split = Literal["train", "held_out", "synthetic"]

_SLACK_SHARE = 0.02
_MAX_SLACK_S = 600.0


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Size, retention and sampling of one topic's records.

    Attributes:
        capacity_bytes: of all records of a topic together.
        retention_s: age at which a record is removed, seconds; from disk at most
            :attr:`disk_slack_s` later.
        remover: when full, ``fifo`` removes the oldest; ``reservoir`` keeps a uniform sample, see
            :func:`table.reservoir_key`; ``priority`` removes those of the lowest loss, the oldest
            of equals.
        held_out_fraction: share of prompts (and of the capacity) for evaluation.
        synthetic_per_record: synthetic records wanted for each training record; above 0 they may
            use the capacity that training records leave free, and are removed for them.
        recent_share: share of a sample that the sampler favors; the rest is uniform.
        recent_half_life: records after which a record's recency weight has halved.
        sampler: ``recency`` or ``priority`` (high losses first). The held-out split is always
            sampled by recency: evaluation must not depend on training.
        priority_exponent: of the loss in a record's weight; 0 is uniform.
    """

    capacity_bytes: int = 64 * 2**20
    retention_s: float = 24 * 3600.0
    remover: Remover = "fifo"
    held_out_fraction: float = 0.2
    synthetic_per_record: float = 0.0
    recent_share: float = 0.5
    recent_half_life: float = 200.0
    sampler: Sampler = "recency"
    priority_exponent: float = 0.6

    def __post_init__(self) -> None:
        if self.remover not in get_args(Remover):
            raise ValueError(f"remover must be fifo, reservoir or priority, not {self.remover!r}")
        if self.sampler not in get_args(Sampler):
            raise ValueError(f"sampler must be recency or priority, not {self.sampler!r}")
        if self.priority_exponent < 0.0:
            raise ValueError("priority_exponent must not be negative")
        if not 0.0 <= self.held_out_fraction <= 1.0 or not 0.0 <= self.recent_share <= 1.0:
            raise ValueError("held_out_fraction and recent_share lie between 0 and 1")
        if not 0.0 <= self.synthetic_per_record < math.inf:
            raise ValueError("synthetic_per_record must not be negative")
        if self.capacity_bytes <= 0 or self.retention_s <= 0 or self.recent_half_life <= 0:
            raise ValueError("capacity_bytes, retention_s and recent_half_life are positive")

    @property
    def disk_slack_s(self) -> float:
        """Seconds past retention that a record may stay on disk: 2 %, at most 10 minutes.

        Without slack every expiry would rewrite the file.
        """
        return min(_SLACK_SHARE * self.retention_s, _MAX_SLACK_S)


@dataclass(frozen=True, slots=True)
class SplitStats:
    """Records of a split, and their bytes."""

    records: int
    bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStats:
    """Records of a topic; ``_total`` counts since the start, of all splits together.

    Attributes:
        topic: of the shard.
        splits: by name.
        bytes: of all splits.
        capacity_bytes: see ReplaySettings.
        inserted_total: records, kept or not, without those that came back from disk.
        inserted_synthetic_total: of these; synthetic ones count only if they were kept.
        evicted_total: removed for others.
        expired_total: removed past retention.
        refused_total: invalid ones that came to the shard.
        refused_values_total: of these, because of impossible numbers.
        left_out_total: requests that left no record, see LeftOut.
        purges_total: purges of all records, or of an answer's that were here or were sampled.
        retained_from: creation, unix seconds, before which records are past retention.
        started_at: since when the shard counts, unix seconds.
    """

    topic: str = ""
    splits: Mapping[Split, SplitStats]
    bytes: int
    capacity_bytes: int
    inserted_total: int
    inserted_synthetic_total: int
    evicted_total: int
    expired_total: int
    refused_total: int = 0
    refused_values_total: int = 0
    left_out_total: int = 0
    purges_total: int = 0
    retained_from: float = -math.inf
    started_at: float = 0.0

    def records(self, *splits: Split) -> int:
        """Records of these splits together."""
        return sum(self.splits[split].records for split in splits)


class ReplayBuffer:
    """The tables of one topic: training, held-out and synthetic records."""

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings
        held_out = int(settings.capacity_bytes * settings.held_out_fraction)
        train = settings.capacity_bytes - held_out
        self._tables: dict[Split, Table] = {
            "train": Table(train, settings.remover),
            "held_out": Table(held_out, settings.remover),
            "synthetic": Table(0, settings.remover),
        }
        self._resize_synthetic()

    def insert(self, record: EncodedRecord, split: Split, now: float) -> bool:
        """Insert a record and remove expired ones; whether it was kept.

        Args:
            record: the record.
            split: its table.
            now: unix seconds.
        """
        self.expire(now)
        if now - record.created > self._settings.retention_s:
            return False
        kept = self._tables[split].insert(record)
        if split == "synthetic" and not kept:  # nothing new to learn from, nor traffic
            self._tables[split].inserted -= 1
        self._resize_synthetic()
        return kept

    def restored(self) -> None:
        """Count from here on: what comes back from disk was counted when it was new."""
        for table in self._tables.values():
            table.inserted = 0

    def _resize_synthetic(self) -> None:
        """Give synthetic records the space that training records leave free."""
        if self._settings.synthetic_per_record:
            train = self._tables["train"]
            self._tables["synthetic"].resize(train.capacity - train.bytes)

    def sample(
        self, n: int, split: Split, now: float, rng: np.random.Generator
    ) -> list[EncodedRecord]:
        """At most ``n`` different records of a split, drawn by the configured sampler."""
        self.expire(now)
        table, settings = self._tables[split], self._settings
        share = settings.recent_share
        if settings.sampler == "priority" and split != "held_out":
            weights = priority_weights(table.losses(), share, settings.priority_exponent)
        else:
            weights = recency_weights(len(table), share, settings.recent_half_life)
        return table.sample(n, weights, rng)

    def update_losses(self, losses: Mapping[str, float]) -> None:
        """Store the latest losses of training and synthetic records, nats, by request_id."""
        self._tables["train"].update_losses(losses)
        self._tables["synthetic"].update_losses(losses)

    def delete(self, request_id: str | None) -> int:
        """Remove a request's records, or all; returns how many."""
        removed = sum(table.delete(request_id) for table in self._tables.values())
        self._resize_synthetic()
        return removed

    def expire(self, now: float) -> None:
        """Remove records past retention; ``now`` in unix seconds."""
        for table in self._tables.values():
            table.expire(now - self._settings.retention_s)
        self._resize_synthetic()

    def records(self) -> list[EncodedRecord]:
        """All records."""
        return [record for table in self._tables.values() for record in table.records()]

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in table for table in self._tables.values())

    def stats(self, now: float) -> ShardStats:
        """Records, bytes and counts, without those of the shard."""
        self.expire(now)
        tables = self._tables.values()
        return ShardStats(
            splits={
                split: SplitStats(len(table), table.bytes, table.capacity)
                for split, table in self._tables.items()
            },
            bytes=sum(table.bytes for table in tables),
            capacity_bytes=self._settings.capacity_bytes,
            inserted_total=sum(table.inserted for table in tables),
            inserted_synthetic_total=self._tables["synthetic"].inserted,
            evicted_total=sum(table.evicted for table in tables),
            expired_total=sum(table.expired for table in tables),
            retained_from=now - self._settings.retention_s,
        )
