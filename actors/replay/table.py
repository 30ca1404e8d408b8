"""The replay table: what is kept, what is removed, what is drawn. Pure; time and RNG come in.

A record that no trainer has seen yet comes before all others; see ``draws.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from paceline.actors.replay.partition import Entry, Partition, Remover

_LEAST_LEVEL = 1e-3  # of a loss, against the highest one: no record's weight is 0


def sampling_weights(count: int, recent_share: float, half_life: float) -> NDArray[np.float64]:
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
    losses: NDArray[np.float64], favoured_share: float, exponent: float
) -> NDArray[np.float64]:
    """Probability of each record where a high loss is favoured; they sum to 1.

    Args:
        losses: float64 ``[R]``, nats; inf where it is not known, which counts as the highest one.
            What lies below a thousandth of the highest one counts as that much.
        favoured_share: weight of the part that goes with loss ** exponent; the rest is uniform.
        exponent: at least 0.
    """
    if len(losses) == 0:
        return np.zeros(0)
    known = np.isfinite(losses)
    highest = float(losses[known].max()) if known.any() else 0.0
    highest = highest if highest > 0.0 else 1.0
    levels = np.where(known, losses, highest) / highest
    levels = np.power(levels.clip(min=_LEAST_LEVEL), exponent)
    weights = favoured_share * levels / levels.sum() + (1.0 - favoured_share) / len(losses)
    normal: NDArray[np.float64] = weights / weights.sum()
    return normal


Split = Literal["train", "held_out", "synthetic"]
Sampler = Literal["recency", "priority"]

_SLACK_SHARE = 0.02
_LONGEST_SLACK_S = 600.0


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How much of the served requests is kept, per topic.

    Attributes:
        capacity_bytes: of all records of a topic together.
        retention_s: age at which a record is dropped, seconds; from disk at most
            :attr:`disk_slack_s` later.
        remover: when full, ``fifo`` drops the oldest; ``reservoir`` keeps a uniform sample, whose
            expired records' room goes to what comes next, see :func:`partition.lot`;
            ``priority`` drops those of the least loss, the oldest of equals.
        sampler: what a sample favours, ``recency`` or a high loss (``priority``). The held-out
            split is always drawn by recency: what judges must not follow what was learnt.
        held_out_fraction: share of prompts (and of the capacity) that judges drafts.
        synthetic_per_record: records of synthetic prompts that are wanted for each one to learn
            from; above 0 they may have what these leave of the capacity, and make way for them.
        recent_share: share of a sample that favours some records; the rest is uniform, so that
            none is forgotten.
        recent_half_life: records after which a record's recency weight has halved.
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
        """Refuse settings that keep nothing or make no sense."""
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
        """How much longer than in memory a record may stay on disk: 2 %, 10 minutes at most.

        Without it every expiry would rewrite the file.
        """
        return min(_SLACK_SHARE * self.retention_s, _LONGEST_SLACK_S)


def rewrite_due(oldest: float, now: float, settings: ReplaySettings) -> bool:
    """Whether a file must be rewritten for the sake of its oldest record.

    Half the slack is left to whoever asks: asking every half slack keeps the promise.

    Args:
        oldest: when the file's oldest record was created, unix seconds; inf where it has none.
        now: unix seconds.
        settings: see ReplaySettings.
    """
    return now - oldest > settings.retention_s + settings.disk_slack_s / 2


class ReplayTable:
    """The splits of one topic: training, held out, and synthetic (for training)."""

    def __init__(self, settings: ReplaySettings) -> None:
        """Start empty."""
        self._settings = settings
        held_out = int(settings.capacity_bytes * settings.held_out_fraction)
        train = settings.capacity_bytes - held_out
        self._splits: dict[Split, Partition] = {
            "train": Partition(train, settings.remover),
            "held_out": Partition(held_out, settings.remover),
            "synthetic": Partition(0, settings.remover),
        }
        self._share_out()

    def insert(self, entry: Entry, split: Split, now: float) -> bool:
        """Take a record and drop what is past retention; whether this one was kept."""
        self.expire(now)
        if now - entry.created > self._settings.retention_s:
            return False
        kept = self._splits[split].insert(entry)
        self._share_out()
        return kept

    def _share_out(self) -> None:
        """Give synthetic records the room that those of the traffic leave."""
        if self._settings.synthetic_per_record:
            train = self._splits["train"]
            self._splits["synthetic"].limit(train.capacity - train.bytes)

    def sample(self, n: int, split: Split, now: float, rng: np.random.Generator) -> list[bytes]:
        """At most ``n`` different records of a split, as the settings' sampler draws."""
        self.expire(now)
        partition, settings = self._splits[split], self._settings
        share = settings.recent_share
        if settings.sampler == "priority" and split != "held_out":
            weights = priority_weights(partition.losses(), share, settings.priority_exponent)
        else:
            weights = sampling_weights(len(partition), share, settings.recent_half_life)
        return partition.sample(n, weights, rng)

    def update_losses(self, losses: Mapping[str, float]) -> None:
        """Take the latest losses by request, in nats, of records to learn from."""
        self._splits["train"].update_losses(losses)
        self._splits["synthetic"].update_losses(losses)

    def delete(self, request_id: str | None) -> int:
        """Drop a request's records, or all; returns how many."""
        removed = sum(partition.delete(request_id) for partition in self._splits.values())
        self._share_out()
        return removed

    def expire(self, now: float) -> None:
        """Drop what is past retention."""
        for partition in self._splits.values():
            partition.expire(now - self._settings.retention_s)
        self._share_out()

    def entries(self) -> list[tuple[Split, Entry]]:
        """Everything that is kept."""
        return [(name, e) for name, part in self._splits.items() for e in part.entries()]

    def has(self, request_id: str) -> bool:
        """Whether a record of this name is kept."""
        return any(part.has(request_id) for part in self._splits.values())

    def stats(self, now: float) -> dict[str, int]:
        """Records and bytes per split, and counts since the start, of both splits together."""
        self.expire(now)
        parts = self._splits.values()
        own = {
            f"{what}_{name}": int(value)
            for name, part in self._splits.items()
            for what, value in (
                ("records", len(part)),
                ("bytes", part.bytes),
                ("capacity_bytes", part.capacity),
            )
        }
        return {
            **own,
            "bytes": sum(part.bytes for part in parts),
            "capacity_bytes": self._settings.capacity_bytes,
            "inserted_total": sum(part.inserted for part in parts),
            "inserted_synthetic_total": self._splits["synthetic"].inserted,
            "evicted_total": sum(part.evicted for part in parts),
            "expired_total": sum(part.expired for part in parts),
        }
